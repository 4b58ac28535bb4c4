"""Serving compared with peers: one trace, one client, each peer's own OpenAI-compatible server."""
