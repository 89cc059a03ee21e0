"""A plan, started: launch, rollout service, weight sync, shared devices, utilization."""
