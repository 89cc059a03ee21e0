"""What a run tells: metrics, trackers, the terminal, advice."""
