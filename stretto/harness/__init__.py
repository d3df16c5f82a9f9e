"""Adapters to other evaluation harnesses: inspect_ai, BFCL, tau2, lm-eval, verifiers."""
