"""A replica of several ranks: its scores are those of one process, whatever is divided among the ranks."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlcore.contracts.reward_replica import RewardReplica
from rlcore.plugins.planning import plan_run
from rlcore.runtime.launch import launch
from rlcore.testing.rewards import make_trajectory, score_all
from rlcore.testing.tiny import write_tiny_classifier
from rlcore.types import Lane, RewardStatus, ScoredTrajectory, Trajectory

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

SHARDED = {"data_parallel": 2, "sharding": "fsdp2"}
MESHES: dict[str, dict[str, Any]] = {
    "two, each whole": {"data_parallel": 2},
    "four, sharded, two slices": {"data_parallel": 4, "context_parallel": 2, "sharding": "fsdp2"},
}
"""Others: tests/engines/test_classifier_ranks.py."""


def samples() -> list[Trajectory]:
    """Samples of different lengths."""
    return [make_trajectory(index // 4, index % 4, text="so " * (index * 5 % 23) + "it is") for index in range(12)]


def both(path: Path, mesh: dict[str, Any], **model: Any) -> dict[str, Any]:
    """A reward by one process, and the same by a mesh of ranks."""
    common = {"path": str(path), "tokenizer": "bytes", "threads": 1, "batch_tokens": 300, **model}
    return {
        "rewards": {name: {"kind": "model", "served_by": f"of_{name}"} for name in ("one", "many")},
        "models": {"of_one": common, "of_many": {**common, **mesh}},
    }


def parts(scored: list[ScoredTrajectory], reward: str) -> list[float]:
    assert [sample.reward.status for sample in scored] == [RewardStatus.OK] * len(scored)
    return [float(sample.reward.components[reward]) for sample in scored]


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_scores_of_several_ranks_are_those_of_one_process(
    config_of: Callable[..., dict[str, Any]], tmp_path: Path, mesh: dict[str, Any]
) -> None:
    path = write_tiny_classifier(tmp_path / "classifier", labels=3)
    model = {"label": 2, "activation": "softmax"}
    plan = plan_run([config_of(**both(path, mesh, **model))], [])

    async def run() -> list[ScoredTrajectory]:
        async with launch(plan, tmp_path / "run") as live:
            return await score_all(live.reward, samples(), Lane.TRAIN)

    scored = asyncio.run(run())
    one, many = parts(scored, "one"), parts(scored, "many")
    assert max(one) - min(one) > 0.01
    assert many == pytest.approx(one, rel=2e-6, abs=1e-7)


def test_ranks_that_slept_score_as_before(config_of: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """Bit for bit: a batch has one row, since the low bits of scores depend on the rows of a batch, and so on time."""
    path = write_tiny_classifier(tmp_path / "classifier")
    plan = plan_run([config_of(**both(path, SHARDED, batch_tokens=1))], [])

    async def run() -> list[list[ScoredTrajectory]]:
        async with launch(plan, tmp_path / "run") as live:
            group = live.groups["of_many"]
            before = await score_all(live.reward, samples(), Lane.TRAIN)
            await group.each(RewardReplica.sleep)
            asleep = asyncio.create_task(score_all(live.reward, samples(), Lane.TRAIN))
            assert not (await asyncio.wait([asleep], timeout=1.0))[0]
            await group.each(RewardReplica.wake)
            after = await asleep
            await group.each(RewardReplica.wake)
            return [before, after]

    before, after = asyncio.run(run())
    assert parts(after, "many") == parts(before, "many")
