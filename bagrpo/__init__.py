"""Reinforcement learning from verifiable rewards with Balanced Aggregation, in JAX."""
