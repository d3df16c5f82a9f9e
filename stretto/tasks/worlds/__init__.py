"""Worlds that are made from a seed: sessions with a state, endless, judged by what is left at the end."""
