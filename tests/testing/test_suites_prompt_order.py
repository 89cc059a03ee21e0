"""The suite of orders of prompts: green on the core's own and on the fake, and red on orders that break a promise."""

import random
from collections.abc import Mapping
from typing import Any

import pytest

from rlcore.contracts.prompt_orders import PromptOrder, PromptOrderOffer
from rlcore.data.order import SEEDED
from rlcore.testing import LeastSeen, PromptOrderSuite
from rlcore.testing.suites.harness import failures


class TestSeeded(PromptOrderSuite):
    target = SEEDED
    covers_within = 4


class TestLeastSeen(PromptOrderSuite):
    target = LeastSeen
    covers_within = 12


class AlwaysTheFirst(LeastSeen):
    def next(self, n, results):
        return [self._rows[index % len(self._rows)] for index in range(n)]


class Short(LeastSeen):
    def next(self, n, results):
        return super().next(n, results)[1:]


class Twice(LeastSeen):
    def next(self, n, results):
        return [*super().next(n, results)[: n - 1], super().next(1, results)[0]] if n < 3 else [self._rows[0]] * n


class Drawn(LeastSeen):
    def next(self, n, results):
        return random.SystemRandom().sample(self._rows * 2, n)


class Forgets(LeastSeen):
    """Leaves out of the state what decides."""

    def __init__(self, context):
        super().__init__(context)
        self._turn = 0

    def next(self, n, results):
        self._turn += 1
        at = self._turn % len(self._rows)
        return [(self._rows[at:] + self._rows[:at])[number % len(self._rows)] for number in range(n)]


class NotRestored(LeastSeen):
    def restore(self, state):
        pass


class Peeks(LeastSeen):
    """Asking for the state moves it on."""

    def state(self):
        found = super().state()
        self._issued += 1
        return found

    def restore(self, state):
        self._issued = state["issued"]


class NeedsResults(LeastSeen):
    """Reads results that need not have come."""

    def next(self, n, results):
        rows = super().next(n, results)
        if len(self.calls) > 5:
            results[rows[0]]
        return rows


class NotJson(LeastSeen):
    def state(self):
        return {"rows": set(self._rows)}


class TakesMore(LeastSeen):
    def __init__(self, context, more):
        super().__init__(context)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "check", "words"),
    [
        (Short, "test_it_returns_as_many_known_rows_as_are_needed", "next(1) returned 0 rows; needs 1"),
        (Twice, "test_it_returns_as_many_known_rows_as_are_needed", "returned the row 'easy/0' twice"),
        (NeedsResults, "test_results_may_come_late_or_not_at_all", "KeyError"),
        (Drawn, "test_the_same_run_issues_the_same_rows", ""),
        (Forgets, "test_another_that_is_restored_continues_alike", "restored after 1 calls, it issues other rows"),
        (NotRestored, "test_another_that_is_restored_continues_alike", "state() after restore() is {'issued': 0}"),
        (NotJson, "test_another_that_is_restored_continues_alike", "needs JSON"),
        (Peeks, "test_asking_for_the_state_changes_nothing", "state() changes the rows: call 1"),
        (TakesMore, "test_it_is_an_order_of_a_context_alone", "takes (context, more), needs (context)"),
        (AlwaysTheFirst, "test_it_comes_to_every_row", "never comes"),
    ],
)
def test_an_order_that_breaks_a_promise_fails_its_check(order: type[PromptOrder], check: str, words: str) -> None:
    class Broken(PromptOrderSuite):
        target = order
        covers_within = 12

    found: Mapping[str, Any] = failures(Broken)
    assert check in found
    assert words in found[check]


@pytest.mark.slow
def test_an_order_that_may_repeat_need_not_give_different_rows() -> None:
    class Repeats(PromptOrderSuite):
        target = PromptOrderOffer("order", Twice, repeats=True)

    assert "test_it_returns_as_many_known_rows_as_are_needed" not in failures(Repeats)
