"""See docs/architecture.md for what lives here and what it may import."""
