"""What the trainer of an RL run computes: recipes, stored samples, credit, objectives, teachers, published weights."""
