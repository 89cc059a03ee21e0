"""Reward functions that each break one promise."""

import itertools
import random

COUNTER = itertools.count()


def right(solution_str, ground_truth):
    """A reward that is right."""
    if solution_str == "unreadable":
        raise ValueError("no answer can be read")
    return float(solution_str.strip().endswith(f"is {ground_truth}"))


def raises_on_empty(solution_str, ground_truth):
    return float(solution_str.split()[-1] == ground_truth)


def not_finite(solution_str, ground_truth):
    return float("inf") if len(solution_str) > 10_000 else 0.0


def draws(solution_str, ground_truth):
    return random.random()


def counts(solution_str, ground_truth):
    return float(next(COUNTER))


def centres(completions, **columns):
    lengths = [len(completion) for completion in completions]
    return [length - sum(lengths) / len(lengths) for length in lengths]


def by_place(completions, **columns):
    return [float(index) for index, _ in enumerate(completions)]


def likes_wrong(solution_str, ground_truth):
    return 1.0 - right(solution_str, ground_truth)


def believes(solution_str, ground_truth):
    return float("correct" in solution_str or solution_str.endswith(f"is {ground_truth}"))


def swallows(solution_str, ground_truth):
    try:
        return right(solution_str, ground_truth)
    except ValueError:
        return 0.0


def text_only(completions, answer, **columns):
    return [float(completion.endswith(truth)) for completion, truth in zip(completions, answer, strict=True)]
