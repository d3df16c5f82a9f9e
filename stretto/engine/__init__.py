"""Generation: continuous batching of requests at every size."""
