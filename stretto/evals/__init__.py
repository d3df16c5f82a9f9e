"""Measurements of networks and of texts: held-out loss, routing, scores, diversity."""
