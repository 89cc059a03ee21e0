"""The example of a scorer, which docs/rewards.md shows: it keeps the contract, and counts in a run."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rlcore import BuildContext, Reward, RunConfig, RunPlan, plan_run
from rlcore.config import RewardFunctionConfig, RolloutConfig
from rlcore.imports import import_target
from rlcore.testing import ScorerSuite, write_prompts
from rlcore.testing.here import HereChildren
from rlcore.testing.rewards import make_trajectory, reward_context, score_all

FILE = Path(__file__).parent.parent.parent / "examples" / "scorer" / "rarity.py"
ROLLOUT = RolloutConfig(samples_per_prompt=4)


async def rarity(context: BuildContext) -> AsyncIterator[Any]:
    yield import_target(f"{FILE}:Rarity")()


class TestRarity(ScorerSuite):
    target = rarity


def plan(directory: Path, *more: str) -> RunPlan:
    prompts = write_prompts(directory / "prompts.jsonl", 2, "say a, {index}")
    settings = ["model.path=none", "model.tokenizer=bytes", f"data.sources.all.path={prompts}", "actor.backend='null'"]
    return plan_run([], [*settings, "rollout.backend='null'", "reward.manager=rarity", *more], ["null", str(FILE)])


def test_the_plan_shows_it_together_with_the_functions(tmp_path: Path) -> None:
    found = plan(tmp_path, "reward.functions.letters.fn=count_letter")
    assert [(part.name, part.served_by) for part in found.reward_components] == [("rarity", "the run's process")]
    assert [function.name for function in found.rewards] == ["letters"]


def test_its_score_is_weighed_and_summed_with_the_functions(tmp_path: Path) -> None:
    config = RewardFunctionConfig(fn="rlcore.testing.letters:count_letter")

    async def run() -> dict[int, Reward]:
        children = HereChildren()
        context = reward_context({"letters": config}, tmp_path, children, config=RunConfig(rollout=ROLLOUT))
        manager = import_target(f"{FILE}:build")(context)
        await manager.start()
        samples = [make_trajectory(0, index, text) for index, text in enumerate(["a", "a", "aab", ""])]
        scored = await score_all(manager, samples)
        await manager.close()
        return {sample.trajectory.id.sample: sample.reward for sample in scored}

    found = asyncio.run(run())
    rarities = [found[sample].components.get("rarity") for sample in range(4)]
    assert rarities == [0.5, 0.5, 1.0, None]
    for reward in found.values():
        letters, rarity = reward.components["letters"], reward.components.get("rarity", 0.0)
        assert reward.score == pytest.approx(letters + 0.1 * rarity)
    assert found[3].info["skipped"] == ["rarity"]
