"""Which prompts are in flight, how their trajectories become groups, and groups a batch."""
