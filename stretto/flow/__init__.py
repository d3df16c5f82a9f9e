"""The flow of an RL run: controller, agents, engines, verifiers and the driver between them and the trainer."""
