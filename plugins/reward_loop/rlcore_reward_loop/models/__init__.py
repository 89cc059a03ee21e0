"""Reward models: the replicas and the models they serve."""
