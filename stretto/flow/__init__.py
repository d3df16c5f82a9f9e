"""The flow of an RL run: controller, agents, engines, verifiers, and the driver that connects them with the trainer."""
