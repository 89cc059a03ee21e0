"""Runs a started plan: launch, rollout service, weight sync, shared devices, utilization."""
