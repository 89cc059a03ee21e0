"""Prompts in an order of a plugin: its return values are checked, and it gets the results of published steps."""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from rlcore.config import DataConfig
from rlcore.contracts.prompt_orders import PromptOrder, PromptOrderOffer, RowResults
from rlcore.data import IssuedPrompts
from rlcore.errors import CheckpointError, PluginError
from rlcore.plan.run_plan import PromptOrderPlan
from rlcore.plan.time_limit import LIMIT
from rlcore.testing import LeastSeen
from rlcore.testing.rewards import make_prompt, make_trajectory
from rlcore.types import Reward, RewardStatus, ScoredTrajectory

WHO = "plugin 'mine' (mine 0.1): prompt order 'mine'"
PROMPTS = {"a": [make_prompt(index, source="a") for index in range(4)]}


def issued(cls: type[PromptOrder], **offer: Any) -> IssuedPrompts:
    plan = PromptOrderPlan(PromptOrderOffer("mine", cls, **offer), "plugin 'mine' (mine 0.1)")
    return IssuedPrompts(PROMPTS, plan, DataConfig(order="mine", solved_at=0.5), 0)


def returning(rows: Any) -> type[PromptOrder]:
    """An order that returns just that."""

    class Order(LeastSeen):
        def next(self, n: int, results: Mapping[str, RowResults]) -> Sequence[str]:
            return rows() if callable(rows) else rows  # type: ignore[no-any-return]

    return Order


def fails() -> None:
    raise ZeroDivisionError("no")


def group(row: int, *rewards: float | None) -> list[ScoredTrajectory]:
    """The group of a row; None is a failed sample."""
    return [
        ScoredTrajectory(
            make_trajectory(PROMPTS["a"][row], sample),
            Reward(0.0, status=RewardStatus.FAILED) if reward is None else Reward(reward),
        )
        for sample, reward in enumerate(rewards)
    ]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (["a/0"], "next(2) returned 1 rows; needs 2"),
        (["a/0", "a/1", "a/2"], "next(2) returned 3 rows; needs 2"),
        (["a/0", "b/1"], "next(2) returned the row 'b/1'; needs the id of a prompt of data.sources.a, such as 'a/0'"),
        (["a/0", 1], "next(2) returned the row 1; needs the id of a prompt"),
        (["a/3", "a/3"], "next(2) returned the row 'a/3' twice; needs different rows, or an offer with repeats=True"),
        (None, "next(2) returned None; needs a list of 2 prompt ids"),
        ("a/", "next(2) returned 'a/'; needs a list of 2 prompt ids"),
        (fails, "next(2): ZeroDivisionError: no"),
    ],
)
def test_wrong_rows_are_one_line_that_names_plugin_order_and_call(rows: Any, words: str) -> None:
    with pytest.raises(PluginError) as caught:
        issued(returning(rows)).next_prompts(2)
    assert str(caught.value).startswith(f"{WHO}: {words}")
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_an_order_that_hangs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT, "0.2")
    with pytest.raises(PluginError, match=r"next\(2\): not done after 0\.2 s, in <lambda> at .*test_issued_prompts"):
        issued(returning(lambda: time.sleep(60))).next_prompts(2)


def test_a_row_may_come_twice_where_the_offer_repeats_or_rows_are_few() -> None:
    taken = issued(returning(["a/1", "a/1"]), repeats=True).next_prompts(2)
    assert [(prompt.id, epoch) for prompt, epoch in taken] == [("a/1", 0), ("a/1", 1)]
    assert len(issued(LeastSeen).next_prompts(9)) == 9


def test_results_are_summed_by_row_and_given_read_only() -> None:
    prompts = issued(LeastSeen)
    prompts.record([(group(0, 1.0, 0.5, 0.0, None), 3), (group(1, 1.0, 1.0), 3), (group(2, None), 3)])
    prompts.record([(group(0, 0.25, 0.25), 4)])
    prompts.next_prompts(1)
    [(_, results)] = prompts._order.calls  # type: ignore[attr-defined]
    assert results.keys() == {"a/0", "a/1"}, "a group of failed samples only does not count"
    assert results["a/0"] == RowResults(2, 5, 2.0, 2, 1, 0.25, 0.0, 4)
    assert (results["a/0"].mean_reward, results["a/0"].solved_frac) == (0.4, 0.4)
    assert results["a/1"] == RowResults(1, 2, 2.0, 2, 1, 1.0, 1.0, 3)


def test_an_order_cannot_write_results() -> None:
    class Writes(LeastSeen):
        def next(self, n: int, results: Any) -> Sequence[str]:
            results["a/0"] = None
            return super().next(n, results)

    with pytest.raises(PluginError, match=r"next\(1\): TypeError"):
        issued(Writes).next_prompts(1)


def test_a_state_is_that_of_its_moment() -> None:
    prompts = issued(LeastSeen)
    prompts.next_prompts(3)
    prompts.record([(group(0, 1.0), 1)])
    state = prompts.state()
    before = json.dumps(state)
    prompts.next_prompts(3)
    prompts.record([(group(1, 1.0), 2), (group(0, 1.0), 2)])
    assert json.dumps(state) == before


def test_results_and_counts_come_back_with_the_state() -> None:
    prompts, resumed = issued(LeastSeen), issued(LeastSeen)
    prompts.next_prompts(6)
    prompts.record([(group(3, 1.0, 0.0), 1)])
    resumed.restore(json.loads(json.dumps(prompts.state())))
    assert resumed.state() == prompts.state()
    left, right = prompts.next_prompts(5), resumed.next_prompts(5)
    assert [(prompt.id, epoch) for prompt, epoch in left] == [(prompt.id, epoch) for prompt, epoch in right]
    assert max(epoch for _, epoch in right) > 0


def test_without_results_nothing_is_kept() -> None:
    prompts = issued(LeastSeen, uses_results=False)
    prompts.record([(group(0, 1.0), 1)])
    assert "results" not in prompts.state()


def test_a_state_that_is_not_restored_and_one_that_is_not_json_are_refused() -> None:
    class Forgets(LeastSeen):
        def restore(self, state: Mapping[str, Any]) -> None: ...

    class NotJson(LeastSeen):
        def state(self) -> dict[str, Any]:
            return {"issued": float("nan")}

    prompts = issued(LeastSeen)
    prompts.next_prompts(2)
    with pytest.raises(PluginError, match=r"state\(\) after restore\(\) is {'issued': 0}; needs {'issued': 2}"):
        issued(Forgets).restore(prompts.state())
    with pytest.raises(PluginError, match=r"state\(\) returned {'issued': nan}; needs JSON"):
        issued(NotJson).state()


def test_a_checkpoint_of_another_order_is_refused() -> None:
    state = issued(LeastSeen).state() | {"order": "seeded"}
    with pytest.raises(
        CheckpointError, match=r"data\.order was seeded, now it is mine; resume with the data of the run"
    ):
        issued(LeastSeen).restore(state)
