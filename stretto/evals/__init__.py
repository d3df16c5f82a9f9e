"""Measuring networks: held-out loss and where tokens go."""
