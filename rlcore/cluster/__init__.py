"""Clusters: where workers and children run."""
