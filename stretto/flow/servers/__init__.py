"""Servers that sample for an RL run: an HTTP client, and the requests of each kind of server."""
