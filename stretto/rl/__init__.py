"""Reinforcement learning: samples, credit, the trainer, and the flow between engines, agents and verifiers."""
