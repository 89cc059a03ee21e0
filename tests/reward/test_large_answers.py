"""Values that functions return with their scores are of plain types, and limited per sample and per step."""

import gc
import os
import pickle
import resource
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlcore.config import RewardFunctionConfig
from rlcore.contracts.scorer import Outcome, failed
from rlcore.errors import RewardError
from rlcore.errors.redaction import LONGEST_LINE, remember_variable
from rlcore.reward import held_info
from rlcore.reward.combine import combine
from rlcore.reward.functions import FunctionRewards
from rlcore.reward.held_info import within_budget
from rlcore.reward.notes import CallNotes
from rlcore.reward.outcome import outcome_of_one, outcome_of_score
from rlcore.testing.rewards import make_trajectory, score_all, use_rewards
from rlcore.types import FrozenDict, Reward, RewardStatus, ScoredTrajectory

LARGE = 5 << 20


@pytest.mark.parametrize(
    "made",
    [
        lambda: "x" * LARGE,
        lambda: "é" * LARGE,
        lambda: [0] * LARGE,
        pytest.param(lambda: [[] for _ in range(LARGE // 32)], marks=pytest.mark.fault),
        lambda: {str(number): 0 for number in range(LARGE // 64)},
        lambda: {"x" * LARGE: 0},
        lambda: 1 << (8 * LARGE),
        lambda: np.zeros(LARGE // 8),
        lambda: [["x" * (LARGE // 10)] for _ in range(10)],
    ],
    ids=["a text", "a wide text", "a list", "lists", "an object", "a key", "a number", "an array", "texts"],
)
def test_more_than_a_few_megabytes_next_to_a_score_fail_the_sample(made: Callable[[], Any]) -> None:
    for outcome in (
        outcome_of_one({"score": 1.0, "much": made()}, 3, may_skip=False),
        outcome_of_one(Reward(1.0, info=FrozenDict({"much": made()})), 3, may_skip=False),
        outcome_of_score((1.0, made()), 3),
        outcome_of_score((1.0, {"much": made()}), 3),
    ):
        assert outcome.status is RewardStatus.FAILED
        assert outcome.error == "returned more than 4 MiB in addition to a score; needs less"
        assert len(pickle.dumps(outcome)) < 1000
    with pytest.raises(RewardError, match=r"log_extra\('c', \.\.\.\): found more than 4 MiB"):
        CallNotes(1).log_extra("c", [made()])


def test_a_megabyte_next_to_a_score_is_kept() -> None:
    outcome = outcome_of_one({"score": 1.0, "much": "x" * (1 << 20)}, 3, may_skip=False)
    assert outcome.status is RewardStatus.OK


def rewards(number: int, size: int) -> list[Reward]:
    """Rewards of one function, each with a text of so many bytes."""
    found = []
    for index in range(number):
        outcomes = {"judge": Outcome(RewardStatus.OK, 1.0, info={"said": chr(97 + index % 26) * size})}
        found.append(within_budget(combine(outcomes, {"judge": 1.0}, 0.0), outcomes))
    return found


@pytest.mark.slow
def test_rewards_beyond_the_budget_of_a_step_fail_and_memory_stays_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_info, "BUDGET", 32 << 20)
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    held = rewards(200, 2 << 20)
    ok = [reward for reward in held if reward.status is RewardStatus.OK]
    failed = [reward for reward in held if reward.status is RewardStatus.FAILED]
    assert len(ok) == 15
    assert len(failed) == 185
    message = "more than 32 MiB are returned besides the scores of a step; functions need to return less"
    assert failed[0].info == {"error": message, "failed": {"judge": message}}
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10
    del held, ok, failed
    gc.collect()
    assert all(reward.status is RewardStatus.OK for reward in rewards(10, 2 << 20))


def test_an_error_that_is_kept_with_its_sample_is_cut_after_its_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLCORE_TEST_TOKEN", "tok-0123456789")
    remember_variable("RLCORE_TEST_TOKEN")
    error = "x" * (LONGEST_LINE - 8) + "tok-0123456789" + "x" * LARGE
    reward = combine({"judge": failed(error)}, {"judge": 1.0}, 0.0)
    assert reward.info["error"].startswith("judge: xxx")
    assert len(reward.info["error"]) <= LONGEST_LINE + 10
    assert len(reward.info["failed"]["judge"]) <= LONGEST_LINE
    assert "tok-" not in reward.info["error"]


@pytest.mark.slow
def test_the_manager_keeps_to_the_budget(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = "async def judge(trajectory):\n    return {'score': 1.0, 'said': 'x' * 200_000}\n"
    (tmp_path / "reward.py").write_text(source)
    monkeypatch.setattr(held_info, "BUDGET", 500_000)

    async def score(manager: FunctionRewards) -> list[ScoredTrajectory]:
        return await score_all(manager, [make_trajectory(0, sample) for sample in range(4)])

    found = use_rewards({"judge": RewardFunctionConfig(fn=f"{tmp_path / 'reward.py'}:judge")}, score)
    assert Counter(scored.reward.status for scored in found) == {RewardStatus.OK: 2, RewardStatus.FAILED: 2}


def test_small_infos_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_info, "BUDGET", 0)
    assert all(reward.status is RewardStatus.OK for reward in rewards(100, 1000))


class Text(str):
    """A text that runs code where it is unpickled."""

    def __reduce__(self) -> Any:
        return os.putenv, ("RLCORE_TEST_RAN", "1")

    def __str__(self) -> str:
        return self


class Float(float):
    """The same."""

    __reduce__ = Text.__reduce__

    def __float__(self) -> float:
        return self


class Whole(int):
    """The same."""

    __reduce__ = Text.__reduce__


class Listed:
    """Says that it is an array, and lists itself as a text that runs code."""

    def tolist(self) -> Any:
        return Text("x")


class Shown:
    """Its text runs code."""

    def __str__(self) -> str:
        return Text("x")


class Endless:
    """Lists itself."""

    def tolist(self) -> Any:
        return self


EVIL = [Text("x"), Float(1.0), Whole(3), Listed(), Shown(), Endless()]


@pytest.mark.filterwarnings("ignore:.*returned non-float:DeprecationWarning")
@pytest.mark.parametrize("value", EVIL, ids=lambda value: type(value).__name__)
def test_no_class_of_a_function_crosses_to_the_controller(value: Any) -> None:
    key = value if isinstance(value, str) else "k"
    notes = CallNotes(1)
    notes.log_extra(key, [value])
    returned: list[Any] = [
        value,
        {"score": 1.0, key: value, "list": [value], "tuple": ({"k": value},)},
        Reward(1.0, info=FrozenDict({key: value, "list": [value]}), components=FrozenDict({key: 1.0})),
        Reward(0.0, status=RewardStatus.FAILED, info=FrozenDict({"error": value})),
    ]
    found = [outcome_of_one(value, 3, may_skip=False) for value in returned]
    found += [outcome_of_score((1.0, value, {key: value}), 3), *notes.on([Outcome(RewardStatus.OK, 1.0)])]
    pickled = pickle.dumps(found)
    assert b"putenv" not in pickled
    pickle.loads(pickled)


class Unreadable(dict[str, Any]):
    """Raises when it is looked at."""

    def items(self) -> Any:
        raise ValueError("no")


class Leaving:
    """Ends the process when it is made a number or a text."""

    def __float__(self) -> float:
        sys.exit(3)

    def __str__(self) -> str:
        sys.exit(4)


class NoText:
    """Its text is a number."""

    def __str__(self) -> Any:
        return 5


CANNOT_BE_READ: dict[str, Any] = {
    "a mapping that raises": Unreadable(score=1),
    "a number that exits": Leaving(),
    "a text that exits": {"score": 1, "x": Leaving()},
    "no text": {"score": 1, "x": NoText()},
    "a key without a text": {"score": 1, NoText(): 1},
}


@pytest.mark.parametrize("name", CANNOT_BE_READ)
def test_a_value_whose_methods_raise_is_one_failed_sample(name: str) -> None:
    outcome = outcome_of_one(CANNOT_BE_READ[name], 3, may_skip=False)
    assert outcome.status is RewardStatus.FAILED
    assert "that cannot be read: " in outcome.error


def test_token_scores_that_no_float32_holds_are_one_failed_sample() -> None:
    outcome = outcome_of_one(Reward(1.0, token_scores=np.array([1e39, 0.0, 0.0])), 3, may_skip=False)
    assert outcome.error == "token_scores hold numbers that are not finite"
