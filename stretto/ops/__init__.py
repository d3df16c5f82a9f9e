"""Operators: attention, routing, experts, norms, log-probabilities, low precision, paged caches, CPU kernels."""
