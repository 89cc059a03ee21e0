"""The suite of scorers, the named parts of a reward that a manager weighs and sums."""

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from rlcore.reward.outcome import Outcome
from rlcore.testing.suites.harness import ComponentSuite, extra, run
from rlcore.testing.rewards import make_prompt, make_trajectory
from rlcore.types import Lane, RewardStatus, Trajectory

T = TypeVar("T")
POLICIES = ("", "drop_sample", "drop_group", "abort")
PARTS = ("name", "scope", "weight", "on_failure", "post_processes", "score", "post_process")


class ScorerSuite(ComponentSuite):
    """A scorer; `target` takes a `BuildContext` and is an async context manager that yields it, started."""

    answer: Any = "7"
    responses: Sequence[str] = ("", "The answer is 7.", "no", "eight words and more, but not a number")
    known_good: Sequence[str] = ()
    known_bad: Sequence[str] = ()
    """Claim: each scores below every one of `known_good`."""
    failing: Sequence[str] = ()
    """Claim: responses that come back FAILED with an error."""
    deterministic: bool = True
    """Claim: asked twice, it says the same."""

    test_it_is_what_its_slot_calls_for = None  # type: ignore[assignment]  # a protocol, and no component
    test_it_closes_twice_and_without_a_start = None  # type: ignore[assignment]
    test_its_state_survives_json = None  # type: ignore[assignment]
    test_its_metrics_are_numbers = None  # type: ignore[assignment]

    @asynccontextmanager
    async def started(self) -> AsyncIterator[Any]:
        """The scorer, which the target starts and ends."""
        async with self.context() as context, asynccontextmanager(self.load())(context) as scorer:
            yield scorer
