"""Everything that can go wrong around a server, at random, and an account of every request."""
