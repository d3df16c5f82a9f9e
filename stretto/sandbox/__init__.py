"""Programs that nobody trusts, and tools that a model may call."""
