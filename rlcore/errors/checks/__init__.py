"""Checks of the values that plugins return during a run: once, on arrival, with the sender's name.

`arrays`: completions, trajectories, rewards, numbers per token, metrics. `results`: what a worker's method returned,
checked against its interface. `components`: the three slots behind these checks.
"""
