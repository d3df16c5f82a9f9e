"""Predictions of memory, speed and cost of a run, before it starts. No torch."""
