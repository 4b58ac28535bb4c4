"""Client side of PocketLLM: speaks to the server over the wire and never imports the engine."""
