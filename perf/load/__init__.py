"""Load for a running server: what clients do, well and badly, and what a server uses meanwhile."""
