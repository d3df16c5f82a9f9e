"""Worlds: generated tasks with state, scored by the final state."""
