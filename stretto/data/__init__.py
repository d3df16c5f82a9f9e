"""From documents to packed batches: sources, token shards, packing, the loader."""
