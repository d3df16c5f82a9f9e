"""One optimisation step, the loop around it, pre-training and healing."""
