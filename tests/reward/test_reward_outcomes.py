"""Results that a reward function may return, and failures for all others."""

import math
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch

from rlcore.contracts.scorer import SKIPPED, Outcome, failed
from rlcore.reward.combine import combine
from rlcore.reward.outcome import outcome_of_one, outcomes_of_many
from rlcore.types import FrozenDict, Reward, RewardStatus


@pytest.mark.parametrize(
    ("value", "score"),
    [
        (1, 1.0),
        (0.25, 0.25),
        (True, 1.0),
        (False, 0.0),
        (np.float64(0.5), 0.5),
        (np.int32(3), 3.0),
        (np.bool_(True), 1.0),
        (np.array(0.5), 0.5),
        (torch.tensor(0.5), 0.5),
        (Decimal("0.5"), 0.5),
        ({"score": np.float32(0.5)}, 0.5),
        (Reward(0.75), 0.75),
    ],
)
def test_a_number_is_a_score(value: Any, score: float) -> None:
    outcome = outcome_of_one(value, 3, may_skip=False)
    assert (outcome.status, outcome.score, type(outcome.score)) == (RewardStatus.OK, score, float)


async def coroutine() -> float:
    return 1.0


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (None, "returned None; needs a number"),
        (math.nan, "returned nan; needs a finite number"),
        (math.inf, "returned inf; needs a finite number"),
        (-math.inf, "returned -inf; needs a finite number"),
        (torch.tensor(math.nan), "returned nan; needs a finite number"),
        (10**400, "which is not a number"),
        (1e200, "which no float32 can hold"),
        ("0.5", "returned str '0.5'; needs a number"),
        (1 + 2j, "returned complex (1+2j); needs a number"),
        ([1.0], "returned list [1.0]; needs a number"),
        ((1.0,), "returned tuple (1.0,); needs a number"),
        (np.array([1.0]), "returned an array of shape (1,); needs a number"),
        (torch.ones(2), "returned an array of shape (2,); needs a number"),
        ({"reward": 1.0}, "returned a dict without 'score'; it has ['reward']"),
        ({"score": None}, "'score': returned None"),
        ((number for number in [1.0]), "returned a generator; needs a number"),
        (object(), "returned a object; needs a number"),
        (Reward(math.nan), "returned nan"),
        (Reward(1.0, components=FrozenDict({"x": math.inf})), "part 'x': returned inf"),
        (Reward(1.0, token_scores=np.zeros(2, np.float32)), "token_scores have shape (2,); needs (3,)"),
        (Reward(1.0, token_scores=np.full(3, np.nan, np.float32)), "not finite"),
        (Reward(0.0, status=RewardStatus.FAILED, info=FrozenDict({"error": "no quota"})), "no quota"),
    ],
)
def test_anything_else_is_a_named_failure(value: Any, error: str) -> None:
    outcome = outcome_of_one(value, 3, may_skip=False)
    assert (outcome.status, outcome.score) == (RewardStatus.FAILED, 0.0)
    assert error in outcome.error


def test_a_coroutine_of_a_plain_function_is_a_failure_and_is_closed() -> None:
    outcome = outcome_of_one(coroutine(), 3, may_skip=False)
    assert "a coroutine from a function that is not async" in outcome.error


def test_a_list_gives_each_sample_its_own_outcome() -> None:
    outcomes = outcomes_of_many([1.0, None, math.nan, "x"], [3, 3, 3, 3])
    assert [outcome.status.value for outcome in outcomes] == ["ok", "skipped", "failed", "failed"]
    for vector in (np.array([1.0, 2.0]), torch.tensor([1.0, 2.0]), (1, 2)):
        assert [value.score for value in outcomes_of_many(vector, [3, 3])] == [1.0, 2.0]


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ([1.0], "returned a list of 1 for 3 samples"),
        ([1.0] * 4, "returned a list of 4 for 3 samples"),
        ([], "returned a list of 0 for 3 samples"),
        (np.array([1.0]), "returned a list of 1 for 3 samples"),
        (1.0, "returned float 1.0; needs a list of 3 numbers"),
        (None, "returned None; needs a list of 3 numbers"),
        ("abc", "returned str 'abc'; needs a list of 3 numbers"),
        ((number for number in [1.0, 1.0, 1.0]), "returned a generator; needs a list of 3 numbers"),
        ({0: 1.0, 1: 1.0, 2: 1.0}, "needs a list of 3 numbers"),
        (np.ones((3, 1)), "needs a list of 3 numbers"),
    ],
)
def test_a_wrong_list_fails_every_sample_and_is_never_broadcast(value: Any, error: str) -> None:
    outcomes = outcomes_of_many(value, [3, 3, 3])
    assert [outcome.status for outcome in outcomes] == [RewardStatus.FAILED] * 3
    assert all(error in outcome.error for outcome in outcomes)


def test_info_holds_plain_values_only() -> None:
    outcome = outcome_of_one({"score": 1, "t": torch.ones(2), "n": np.int64(3), "o": Decimal(1)}, 3, may_skip=False)
    assert outcome.info == {"t": [1.0, 1.0], "n": 3, "o": "1"}
    assert type(outcome.info["n"]) is int


def test_outcomes_combine_into_a_weighted_sum_of_those_that_have_an_opinion() -> None:
    outcomes = {
        "a": Outcome(RewardStatus.OK, 2.0, info={"answer": "4", "n": 1}),
        "b": Outcome(RewardStatus.OK, 3.0, info={"answer": "5"}),
        "c": SKIPPED,
    }
    reward = combine(outcomes, {"a": 0.5, "b": -1.0, "c": 100.0}, 1.5)
    assert (reward.score, reward.status, reward.latency_s) == (0.5 * 2 - 3, RewardStatus.OK, 1.5)
    assert dict(reward.components) == {"a": 2.0, "b": 3.0}
    assert dict(reward.info) == {"a/answer": "4", "a/n": 1, "b/answer": "5", "answer": "4", "skipped": ["c"]}


def test_scores_per_token_are_weighed_and_added() -> None:
    ones = np.ones(3, np.float32)
    outcomes = {name: Outcome(RewardStatus.OK, 0.0, token_scores=ones) for name in "ab"}
    reward = combine(outcomes, {"a": 0.5, "b": 2.0}, 0.0)
    np.testing.assert_array_equal(reward.token_scores, np.full(3, 2.5, np.float32))


def test_one_failed_function_fails_the_sample_and_the_other_parts_are_kept() -> None:
    reward = combine({"a": Outcome(RewardStatus.OK, 2.0), "b": failed("no")}, {"a": 1.0, "b": 1.0}, 0.0)
    assert (reward.status, reward.score, dict(reward.components)) == (RewardStatus.FAILED, 0.0, {"a": 2.0})
    assert dict(reward.info) == {"error": "b: no", "failed": {"b": "no"}}
