"""Checks of what plugins offer before a run, and of the values that they return during it, with the sender's name.

`arrays`: completions, trajectories, rewards, numbers per token, metrics; each is checked once, on arrival. `results`:
the result of a worker's method, against its interface. `data`: fields of offers and requests. `interfaces`: classes.
`targets`: import strings. `same_prompt`: the prompt of a trajectory and that of its task.
"""
