"""The suite of orders of prompts."""

import json
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

from rlcore.config.sections import DataConfig, SourceConfig
from rlcore.contracts.prompt_orders import PromptOrder, PromptOrderOffer
from rlcore.data import IssuedPrompts
from rlcore.errors.checks.interfaces import breaches, refuses
from rlcore.plan.run_plan import PromptOrderPlan
from rlcore.testing.rewards import make_prompt, make_trajectory
from rlcore.testing.suites.harness import Suite, extra
from rlcore.types import Prompt, Reward, ScoredTrajectory

SAMPLES = 4
"""Samples of a group."""


class PromptOrderSuite(Suite):
    """An order of prompts; `target` is its `PromptOrderOffer`, or the class.

    The suite requests rows as a run does, with the same checks. Its rewards depend only on row, time and sample.
    """

    prompts: Mapping[str, Sequence[Prompt]] = {
        "easy": [make_prompt(index, source="easy") for index in range(7)],
        "hard": [make_prompt(index, source="hard") for index in range(5)],
    }
    """The training prompts by source; replace them for an order that reads other columns."""
    covers_within: int = 0
    """Claim: the number of calls for 4 rows in which every row is issued at least once; 0: no claim."""

    @property
    def offer(self) -> PromptOrderOffer:
        """The offer; for a class, one that does not repeat rows and uses results."""
        found = self.load()
        return found if isinstance(found, PromptOrderOffer) else PromptOrderOffer("order", found)

    def issued(self, seed: int = 0) -> IssuedPrompts:
        """A fresh order with the checks of a run."""
        config = self.config()
        data = DataConfig(sources={name: SourceConfig() for name in self.prompts}, order=self.offer.name)
        return IssuedPrompts(self.prompts, PromptOrderPlan(self.offer, self.who, self.section(config)), data, seed)

    def rows(self, issued: IssuedPrompts, calls: int, n: int = 4, late: int = 0) -> list[list[str]]:
        """The rows of `calls` calls for `n`. The results of a call arrive `late` calls after the next one."""
        found, pending = [], deque[list[tuple[Prompt, int]]]()
        for version in range(calls):
            pending.append(issued.next_prompts(n))
            found.append([prompt.id for prompt, _ in pending[-1]])
            if len(pending) > late:
                issued.record((group_of(prompt, epoch), version) for prompt, epoch in pending.popleft())
        return found

    def test_it_is_an_order_of_a_context_alone(self) -> None:
        """It is a subclass with the methods of `PromptOrder`, built as `cls(context)`."""
        found = [*breaches(self.offer.cls, PromptOrder)] or [refuses(self.offer.cls, ["context"])]
        self.need(not any(found), "; ".join(found))

    def test_it_returns_as_many_known_rows_as_are_needed(self) -> None:
        """It returns from one row to more than there are. They differ, unless the offer repeats."""
        for n in (1, 4, 12, 17):
            self.rows(self.issued(), 4, n)

    def test_results_may_come_late_or_not_at_all(self) -> None:
        """Some schedules issue ahead, and some groups are dropped."""
        for late in (1, 2, 100):
            self.rows(self.issued(), 12, 4, late)

    def test_the_same_run_issues_the_same_rows(self) -> None:
        """Rows depend only on seed, prompts and results."""
        one, other = self.rows(self.issued(seed=3), 12), self.rows(self.issued(seed=3), 12)
        self.need(one == other, f"two runs of one seed issue different rows: {first_difference(one, other)}")

    def test_another_that_is_restored_continues_alike(self) -> None:
        """This holds at any moment. The state passes through JSON, as in a checkpoint."""
        for calls in (0, 1, 5, 9):
            one, other = self.issued(), self.issued()
            self.rows(one, calls)
            other.restore(json.loads(json.dumps(one.state())))
            left, right = self.rows(one, 8), self.rows(other, 8)
            self.need(
                left == right,
                f"restored after {calls} calls, it issues other rows: {first_difference(left, right)}; needs all "
                "that decides in state()",
            )

    def test_asking_for_the_state_changes_nothing(self) -> None:
        """A run requests the state after every step and for every checkpoint."""
        quiet, queried = self.issued(), self.issued()
        one: list[Any] = []
        other: list[Any] = []
        for _ in range(8):
            one += self.rows(quiet, 1)
            other += self.rows(queried, 1)
            queried.state()
        self.need(one == other, f"state() changes the rows: {first_difference(one, other)}")

    @extra("covers_within")
    def test_it_comes_to_every_row(self) -> None:
        """A row that is never issued is not trained on."""
        rows = {row for call in self.rows(self.issued(), self.covers_within) for row in call}
        missing = sorted({prompt.id for prompts in self.prompts.values() for prompt in prompts} - rows)
        self.need(not missing, f"within {self.covers_within} calls for 4 rows, '{''.join(missing[:1])}' never comes")


def group_of(prompt: Prompt, epoch: int) -> list[ScoredTrajectory]:
    """The scored samples of a row's group, with rewards of 0 and 1; some rows have mostly, always or never 1."""
    rate = crc32(prompt.id.encode()) % 5 / 4
    return [
        ScoredTrajectory(
            make_trajectory(prompt, sample),
            Reward(float(crc32(f"{prompt.id} {epoch} {sample}".encode()) % 1000 < 1000 * rate)),
        )
        for sample in range(SAMPLES)
    ]


def first_difference(one: Sequence[Any], other: Sequence[Any]) -> str:
    """The first call with different rows in two runs, and the rows of each."""
    return next(
        (
            f"call {number}: {left} and {right}"
            for number, (left, right) in enumerate(zip(one, other, strict=True))
            if left != right
        ),
        "none",
    )
