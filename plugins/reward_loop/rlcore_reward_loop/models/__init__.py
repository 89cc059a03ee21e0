"""Reward models: replicas, and what they serve."""
