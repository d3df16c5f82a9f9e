"""Isolation of untrusted programs, and the tools that a model may call."""
