"""Reports of a run: metrics, trackers, the terminal, advice."""
