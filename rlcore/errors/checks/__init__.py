"""Values that plugins hand over while a run goes on, checked once, when they arrive, by the name of who sent them.

`arrays`: completions, trajectories, rewards, numbers per token, metrics. `results`: what a worker's method returned,
checked against its interface. `components`: the three slots behind these checks.
"""
