"""What the trainer of an RL run computes: recipes, stored samples, credit, objectives, teachers, and the weights it publishes."""
