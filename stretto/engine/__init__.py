"""Generation: requests in, tokens out, one batch of every size."""
