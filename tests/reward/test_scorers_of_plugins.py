"""Properties and results of a plugin's scorer are checked, and errors name the one that is wrong."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlcore.config import RewardFunctionConfig
from rlcore.contracts.scorer import Outcome, Scorer, failed
from rlcore.errors import ConfigError, PluginError, RewardError
from rlcore.report.metrics import trajectory_lines
from rlcore.reward.functions import FunctionRewards
from rlcore.testing.here import HereChildren
from rlcore.testing.rewards import make_trajectory, reward_context, score_all
from rlcore.train.saved_samples import read_scored, write_scored
from rlcore.types import Lane, Reward, RewardStatus, ScoredTrajectory, Trajectory

GOOD = Outcome(RewardStatus.OK, 2.0)


class Fixed(Scorer):
    """Returns the configured value."""

    name: Any = "fixed"
    weight: Any = 1.0

    def __init__(self, returned: Any, **properties: Any) -> None:
        self.returned = returned
        self.properties = properties

    def __getattribute__(self, name: str) -> Any:
        properties = object.__getattribute__(self, "__dict__").get("properties", {})
        return properties[name] if name in properties else object.__getattribute__(self, name)

    async def score(self, trajectories: Sequence[Trajectory], lane: Lane) -> list[Outcome]:
        if isinstance(self.returned, Exception):
            raise self.returned
        return self.returned  # type: ignore[no-any-return]


def rewards(directory: Path, *scorers: Scorer, functions: Sequence[str] = ()) -> list[Reward]:
    """The reward of one sample by these scorers and functions."""

    async def run() -> list[Reward]:
        configs = {name: RewardFunctionConfig(fn="rlcore.testing.letters:count_letter") for name in functions}
        manager = FunctionRewards(reward_context(configs, directory, HereChildren()), scorers)
        await manager.start()
        try:
            return [sample.reward for sample in await score_all(manager, [make_trajectory(0, 0, "a")])]
        finally:
            await manager.close()

    return asyncio.run(run())


def test_a_subclass_with_a_name_and_a_score_is_a_scorer(tmp_path: Path) -> None:
    class Least(Scorer):
        name = "least"

        async def score(self, trajectories: Sequence[Trajectory], lane: Lane) -> list[Outcome]:
            return [GOOD] * len(trajectories)

    least = Least()
    assert (least.scope, least.weight, least.on_failure, least.post_processes) == ("sample", 1.0, "drop_sample", False)
    assert asyncio.run(least.post_process([], [GOOD], Lane.TRAIN)) == [GOOD]
    assert [reward.score for reward in rewards(tmp_path, least)] == [2.0]


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        ([GOOD, GOOD], "score() returned 2 outcomes; needs a list of 1 outcomes"),
        ([], "score() returned 0 outcomes"),
        (None, "score() returned None"),
        ([1.0], "score() returned 1.0; needs an Outcome"),
        ([Outcome("ok", 1.0)], "needs an Outcome with a RewardStatus"),  # type: ignore[arg-type]
        ([Outcome(RewardStatus.OK, float("nan"))], "score() returned the numbers [nan]"),
        ([Outcome(RewardStatus.OK, 1e39)], "score() returned the numbers [1e+39]"),
        ([Outcome(RewardStatus.OK, 1.0, components={"a": float("inf")})], "score() returned the numbers [1.0, inf]"),
        ([Outcome(RewardStatus.OK, "1")], "score() returned the numbers ['1']"),  # type: ignore[arg-type]
        ([failed("")], "score() returned a FAILED outcome without an error"),
        ([Outcome(RewardStatus.OK, 1.0, token_scores=np.ones(99, np.float32))], "token_scores of shape (99,)"),
        ([Outcome(RewardStatus.OK, 1.0, token_scores=[1.0])], "token_scores that are [1.0]; needs a numpy array"),  # type: ignore[arg-type]
        (ValueError("a bug"), "score(): ValueError: a bug"),
    ],
)
def test_what_it_returns_is_checked(tmp_path: Path, returned: Any, problem: str) -> None:
    with pytest.raises(PluginError) as error:
        rewards(tmp_path, Fixed(returned))
    assert str(error.value).startswith("scorer 'fixed' (Fixed): ")
    assert problem in str(error.value)


def test_a_failure_is_data(tmp_path: Path) -> None:
    broken = [failed("no service answers")]
    [reward] = rewards(tmp_path, Fixed(broken), Fixed([GOOD], name="other"))
    assert (reward.status, dict(reward.components)) == (RewardStatus.FAILED, {"other": 2.0})
    assert reward.info["failed"] == {"fixed": "no service answers"}
    with pytest.raises(RewardError, match="no service answers"):
        rewards(tmp_path, Fixed(broken, on_failure="abort"))


def test_scores_of_tokens_are_those_of_the_trajectory(tmp_path: Path) -> None:
    num_tokens = len(make_trajectory(0, 0, "a").token_ids)
    scores = np.arange(num_tokens, dtype=np.float32)
    [reward] = rewards(tmp_path, Fixed([Outcome(RewardStatus.OK, 1.0, token_scores=scores)], weight=2.0))
    assert reward.token_scores is not None
    assert reward.token_scores.tolist() == (2 * scores).tolist()


def test_numbers_of_numpy_are_kept_as_those_that_json_has(tmp_path: Path) -> None:
    trajectory = make_trajectory(0, 0, "a")
    tokens: Any = np.ones(len(trajectory.token_ids), np.float64)
    score: Any = np.float32(0.5)
    length: Any = np.int64(3)
    outcome = Outcome(RewardStatus.OK, score, "", {"length": length}, {"count": np.int64(7)}, tokens)
    [reward] = rewards(tmp_path, Fixed([outcome]))
    assert dict(reward.components) == {"fixed": 0.5, "fixed/length": 3.0}
    assert {type(reward.score), *map(type, reward.components.values())} == {float}
    assert reward.token_scores is not None
    assert reward.token_scores.dtype == np.float32
    row = ScoredTrajectory(trajectory, reward)
    write_scored(tmp_path / "scored", [row])
    [again] = read_scored(tmp_path / "scored", lambda name: trajectory.prompt)
    assert dict(again.reward.components) == dict(reward.components)
    assert dict(again.reward.info) == {"count": 7}
    line = json.loads(trajectory_lines([(row, None)], Lane.TRAIN))
    assert (line["score"], line["components"], line["info"]) == (0.5, dict(reward.components), {"count": 7})


@pytest.mark.parametrize(
    ("properties", "problem"),
    [
        ({"name": ""}, "scorer Fixed: name is ''"),
        ({"name": 3}, "scorer Fixed: name is 3"),
        ({"scope": "step"}, "scorer 'fixed' (Fixed): scope is 'step'; needs one of: sample, group, batch"),
        ({"weight": float("nan")}, "weight is nan; needs a finite number"),
        ({"weight": "1"}, "weight is '1'; needs a finite number"),
        ({"on_failure": "retry"}, "on_failure is 'retry'; needs one of: drop_sample, drop_group, abort"),
        ({"post_processes": 1}, "post_processes is 1; needs True or False"),
    ],
)
def test_what_it_says_of_itself_is_checked(tmp_path: Path, properties: dict[str, Any], problem: str) -> None:
    with pytest.raises(PluginError) as error:
        rewards(tmp_path, Fixed([GOOD], **properties))
    assert problem in str(error.value)


def test_two_parts_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="two parts are named 'fixed'"):
        rewards(tmp_path, Fixed([GOOD]), Fixed([GOOD]))
    with pytest.raises(ConfigError, match="two parts are named 'fixed'"):
        rewards(tmp_path, Fixed([GOOD]), functions=["fixed"])
