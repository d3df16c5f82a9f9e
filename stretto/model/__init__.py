"""The network, its Subnets, and its checkpoints in every form."""
