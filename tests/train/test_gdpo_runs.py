"""Runs whose estimator compares the scores of each reward function."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import rlcore
from rlcore.algo.advantage import AdvantageInputs
from rlcore.algo.decoupled import gdpo
from rlcore.errors import ConfigError
from rlcore.testing.runs import run_settings

pytestmark = pytest.mark.slow

FUNCTIONS = """
def vowels(completions, **columns):
    return [sum(text.count(letter) for letter in "aeiou") for text in completions]


def long(completions, **columns):
    return [None if text.startswith("a") else 100.0 * len(set(text)) for text in completions]
"""
MANAGER = """
from rlcore import Component, RewardManager, hookimpl
from rlcore.types import Reward, ScoredTrajectory

RLCORE_API = "1"


class Lengths(RewardManager):
    def __init__(self, context):
        self.context = context

    async def score(self, stream, lane):
        async for row in stream:
            yield ScoredTrajectory(row, Reward(float(row.num_sampled)))


@hookimpl
def rlcore_reward_managers():
    return [Component("lengths", Lengths)]
"""
WEIGHTS = {"vowels": 1.0, "long": 0.5, "letters": -0.25}


def settings_of(directory: Path, **more: Any) -> dict[str, Any]:
    """Three functions: one of large scores that skips samples, and one of negative weight."""
    functions = directory / "functions.py"
    functions.write_text(FUNCTIONS)
    return run_settings(
        directory,
        32,
        **{
            "algo.preset": "gdpo",
            "reward.functions.vowels.fn": f"{functions}:vowels",
            "reward.functions.long.fn": f"{functions}:long",
            **{f"reward.functions.{name}.weight": weight for name, weight in WEIGHTS.items()},
            "rollout.samples_per_prompt": 4,
            "train.prompts_per_step": 4,
            "train.name": "run",
            **more,
        },
    )


def advantages_of(rows: Sequence[dict[str, Any]]) -> list[float]:
    """The estimator's advantages for the scores in the run's files."""
    prompts = sorted({row["id"]["prompt"] for row in rows})
    scores = [[row["components"].get(name, float("nan")) for name in WEIGHTS] for row in rows]
    inputs = AdvantageInputs(
        rewards_B=torch.tensor([row["score"] for row in rows]),
        group_B=torch.tensor([prompts.index(row["id"]["prompt"]) for row in rows]),
        sample_B=torch.arange(len(rows)),
        lengths_B=torch.ones(len(rows)),
        scores_BF=torch.tensor(scores),
        weights_F=torch.tensor(list(WEIGHTS.values())),
    )
    found: list[float] = gdpo(inputs).tolist()
    return found


def test_advantages_are_those_of_the_written_scores(tmp_path: Path) -> None:
    result = rlcore.train(settings_of(tmp_path), plugins=["null"])
    for step in (1, 2):
        rows = list(result.trajectories(step))
        assert len(rows) == 16
        assert [row["advantage"] for row in rows] == pytest.approx(advantages_of(rows), rel=1e-4)


def test_a_manager_whose_scores_are_no_weighted_sums_is_refused(tmp_path: Path) -> None:
    plugin = tmp_path / "lengths.py"
    plugin.write_text(MANAGER)
    settings = run_settings(tmp_path, 8, **{"reward.manager": "lengths", "algo.advantage": "gdpo"})
    settings = {key: value for key, value in settings.items() if not key.startswith("reward.functions")}
    with pytest.raises(
        ConfigError, match=r"^reward\.manager=lengths: .*lengths.* states no `weights`.*advantage=grpo$"
    ):
        rlcore.train(settings, plugins=["null", str(plugin)])
