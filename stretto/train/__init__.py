"""Pre-training, elasticizing and healing: the optimisation step, the loop, and the preparation of text."""
