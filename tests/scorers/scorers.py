"""Reward functions of every kind, good and bad, for test_reward_functions.py and test_reward_running.py."""
# ruff: noqa: E731 - lambdas with a name are among what is refused

import asyncio
import time
from pathlib import Path

from rlcore.types import FrozenDict, Reward


def length(trajectory):
    return len(trajectory.text())


def last_token(trajectory):
    return int(trajectory.token_ids[-1]) + 1000 * trajectory.id.sample


def trl(prompts, completions, answer, **columns):
    return [float(a in c) for a, c in zip(answer, completions, strict=True)]


def trl_seen(prompts, completions, completion_ids, trainer_state, level, **kwargs):
    assert isinstance(prompts, list)
    assert isinstance(completions, list)
    seen[:] = [prompts, completions, completion_ids, trainer_state.global_step, level, sorted(kwargs)]
    return [Reward(1.0, info=FrozenDict({"seen": repr(seen)}))]


seen = []


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    score = float(ground_truth in solution_str)
    return {"score": score, "pred": solution_str[-1:], "extra": repr(extra_info), "from": data_source}


def by_kwargs(trajectory, bonus, factor=1.0):
    return bonus * factor


class Counted:
    def __init__(self, start=0):
        self.count = start

    def setup(self):
        self.ready = True

    def score(self, trajectory):
        assert self.ready
        return self.count


def rank(completions, **columns):
    longest = max(map(len, completions))
    return [len(c) / longest for c in completions]


def batch_size(trajectories):
    return [len(trajectories)] * len(trajectories)


def raises_on_bad(trajectory):
    if "bad" in trajectory.text():
        raise ValueError("this one is bad\nsecond line")
    return 1.0


def skips(completions, **columns):
    return [None if "skip" in completion else 1.0 for completion in completions]


def mutates(completions, tags, **columns):
    tags[0].append("seen")
    return [float(len(tags[0]))]


async def mutates_async(completions, tags, **columns):
    tags[0].append("seen")
    return [float(len(tags[0]))]


def tokens(trajectory):
    return Reward(2.0, components=FrozenDict({"format": 0.5}), token_scores=trajectory.loss_mask.astype("float32"))


def slow(trajectory, seconds=0.2):
    time.sleep(seconds)
    return 1.0


async def async_slow(trajectory, seconds=0.2):
    await asyncio.sleep(seconds)
    return float(trajectory.id.sample)


async def async_raises(trajectory):
    raise KeyError("gone")


async def async_deaf(trajectory):
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            if "deaf" not in trajectory.text():
                raise


async def blocks(trajectory):
    await asyncio.sleep(0)
    time.sleep(0.8)
    return 1.0


class AsyncJudge:
    def __init__(self, base):
        self.base = base

    async def setup(self):
        self.open = True

    async def score(self, prompts, completions, **columns):
        assert self.open
        await asyncio.sleep(0)
        return [self.base + len(c) for c in completions]

    async def close(self):
        self.open = False


def flaky(trajectory, marker):
    count = int(Path(marker).read_text()) if Path(marker).exists() else 0
    Path(marker).write_text(str(count + 1))
    if count < 2:
        raise ConnectionError("come back later")
    return 1.0


def with_alarm(trajectory):
    import signal

    def ring(*_):
        raise TimeoutError("rang")

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        time.sleep(5)
    except TimeoutError:
        return 0.25


def never(trajectory):
    return 0


def imported(trajectory):
    import sys

    heavy = {"torch", "transformers", "omegaconf", "pluggy", "rlcore.plan", "rlcore.config"}
    return Reward(1.0, info=FrozenDict({"heavy": sorted(heavy & set(sys.modules))}))


nested = (lambda: lambda trajectory: 1.0)()
anonymous = lambda trajectory: 1.0


def misspelt(completion, **columns):
    return [1.0 for _ in completion]


def two_arguments(a, b):
    return 1.0


def star(*args, **kwargs):
    return 1.0


class NoScore:
    pass


not_callable = 3


class Panic(BaseException):
    """An exception that some libraries raise when their own code is wrong."""


class Unsayable(Exception):
    """Cannot be put into words."""

    def __str__(self):
        raise KeyError("message")


async def async_panics(completions, **columns):
    raise Panic("lost")


async def async_unsayable(completions, **columns):
    raise Unsayable
