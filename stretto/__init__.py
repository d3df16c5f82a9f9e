"""Stretto: one Mixture-of-Experts language model, trained once, that contains every smaller version of itself."""

__version__ = "0.1.0"
