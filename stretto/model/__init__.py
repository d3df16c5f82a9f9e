"""The network, its Subnets, and its checkpoints in every format."""
