"""The only place where text becomes tokens and tokens become text."""
