"""One sample as a conversation: turns, environments, and the trajectory it becomes."""
