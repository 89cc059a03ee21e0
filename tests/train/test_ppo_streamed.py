"""PPO with streamed mini-batches: the same as unstreamed where it can be, whitened by mini-batch, and it learns."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlcore.plugins.planning import plan_run
from rlcore.report import metrics
from rlcore.testing.causes import Script, play
from rlcore.testing.runs import differing, run_settings
from rlcore.testing.tiny import write_tiny_model
from rlcore.train import train
from rlcore.types import Batch

pytestmark = pytest.mark.usefixtures("rewards_in_process")

REWARDS = """
import asyncio, zlib

async def evens(trajectory):
    # In an order that has nothing to do with the order of prompts.
    await asyncio.sleep(0.02 * zlib.crc32(repr(trajectory.id).encode()) / 2**32)
    return float((trajectory.token_ids[trajectory.loss_mask] % 2 == 0).mean())
"""
STREAM = ("schedule.stream_minibatches=true",)
PROMPTS = 4


def settings(directory: Path, backend: str, **more: Any) -> list[str]:
    """Overrides of a PPO run in which rewards come in another order than prompts."""
    (directory / "rewards.py").write_text(REWARDS)
    engines: dict[str, Any] = {
        "actor.backend": f"'{backend}'",
        "rollout.backend": f"'{backend}'",
        "plugins.critic_engine.backend": f"'{backend}'",
    }
    if backend == "hf":
        engines |= {"model.path": str(write_tiny_model(directory / "tiny")), "plugins.critic_engine.lr": 0.01}
    named = {
        "algo.preset": "ppo",
        "critic.engine": "critic_engine",
        "reward.functions.letters.fn": f"{directory / 'rewards.py'}:evens",
        "rollout.samples_per_prompt": 4,
        "train.prompts_per_step": PROMPTS,
        "cluster.threads": 1,
        **engines,
        **more,
    }
    return [f"{key}={value}" for key, value in run_settings(directory, 20, **named).items()]


def trained(overrides: list[str], *more: str) -> Path:
    null = ["null"] if "actor.backend='null'" in overrides else []
    return train({}, *overrides, *more, plugins=[*null, "critic_engine"]).run_dir


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["null", "hf"])
def test_a_streamed_run_with_one_minibatch_a_step_equals_the_unstreamed_one(backend: str, tmp_path: Path) -> None:
    overrides = settings(tmp_path, backend, **{"actor.minibatch_prompts": 0, "train.max_steps": 3, "actor.lr": 0.01})
    whole, streamed = (trained(overrides, *mode, f"train.name={len(mode)}") for mode in ((), STREAM))
    only_streamed = [f"metrics.jsonl, line {step}: ['schedule/length_correlation']" for step in (1, 2, 3)]
    assert differing(whole, streamed) == only_streamed


def test_the_adaptive_kl_coefficient_moves_once_a_step_with_streamed_minibatches_too(tmp_path: Path) -> None:
    kl = ("placement=reward", "controller=adaptive", "coef=0.1", "target=1000", "horizon=3")  # so 0.8 times a step
    overrides = settings(tmp_path, "null", **{"actor.minibatch_prompts": 1, "train.max_steps": 3})
    run = trained(overrides, *STREAM, *(f"algo.kl.{setting}" for setting in kl), "reference.backend='null'")
    coefs = [row["policy/kl_coef"] for row in metrics.read(run)]
    assert coefs == pytest.approx([0.1, 0.08, 0.064])
    (saved,) = (run / "checkpoints").glob("*/state.json")
    assert json.loads(saved.read_text())["kl"] == {"coef": pytest.approx(0.0512)}


def advantages(run: Path) -> dict[str, float]:
    """Of each sample of the first step."""
    return {str(row["id"]): row["advantage"] for row in metrics.read_trajectories(run, 1)}


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["null", "hf"])
def test_without_whitening_streaming_changes_no_advantage(backend: str, tmp_path: Path) -> None:
    overrides = settings(
        tmp_path,
        backend,
        **{"actor.minibatch_prompts": 1, "train.max_steps": 1, "algo.whiten_advantages": "false"},
    )
    whole, streamed = (advantages(trained(overrides, *mode, f"train.name={len(mode)}")) for mode in ((), STREAM))
    assert len(whole) == 4 * PROMPTS
    assert streamed == pytest.approx(whole, abs=1e-6)
    assert len(set(whole.values())) > 1


def minibatches(directory: Path, *overrides: str) -> list[Batch]:
    """Those of one step with mini-batches of one prompt."""
    arguments = settings(directory, "null", **{"actor.minibatch_prompts": 1})
    plan = plan_run([], [*arguments, *overrides], ["null", "critic_engine"])
    found = asyncio.run(play(plan, directory, Script(), 1)).minibatches
    assert len(found) == PROMPTS
    return found


def spread(minibatches: list[Batch]) -> tuple[float, float]:
    """Mean and standard deviation of all their token advantages."""
    pairs = [
        (minibatch.advantages_BT, minibatch.tokens.loss_mask_BT)
        for minibatch in minibatches
        if minibatch.advantages_BT is not None
    ]
    chosen_N = np.concatenate([advantages_BT[mask_BT] for advantages_BT, mask_BT in pairs])
    return float(chosen_N.mean()), float(chosen_N.std())


@pytest.mark.slow
def test_streamed_advantages_are_whitened_over_each_minibatch_and_else_over_the_step(tmp_path: Path) -> None:
    for minibatch in minibatches(tmp_path, *STREAM):
        assert spread([minibatch]) == pytest.approx((0.0, 1.0), abs=1e-4)
    whole = minibatches(tmp_path)
    assert spread(whole) == pytest.approx((0.0, 1.0), abs=1e-4)
    assert all(spread([sample]) != pytest.approx((0.0, 1.0), abs=1e-2) for sample in whole)


def test_the_plan_says_what_streamed_advantages_are_whitened_over(tmp_path: Path) -> None:
    arguments = settings(tmp_path, "null")
    for more, streamed in (((), False), (STREAM, False), ((*STREAM, "actor.minibatch_prompts=1"), True)):
        notes = plan_run([], [*arguments, *more], ["null", "critic_engine"]).notes
        assert any("whitened over each mini-batch" in note for note in notes) is streamed


@pytest.mark.slow
def test_streamed_ppo_learns(tmp_path: Path) -> None:
    learning = {"actor.lr": 0.02, "actor.minibatch_prompts": 2, "rollout.samples_per_prompt": 8, "train.max_steps": 10}
    run = trained(settings(tmp_path, "hf", **learning), *STREAM)
    rows = [row for row in metrics.read(run) if "reward/mean" in row]
    assert sum(row["reward/mean"] for row in rows[-3:]) / 3 > 0.8, "about 0.5 of the tokens of a random policy are even"
    assert sum(row["critic/loss"] for row in rows[-3:]) < sum(row["critic/loss"] for row in rows[:3])


@pytest.mark.slow
def test_streamed_the_actor_waits_while_the_critic_warms_up(tmp_path: Path) -> None:
    waiting = {"actor.minibatch_prompts": 2, "plugins.critic_engine.actor_waits_updates": 2, "train.max_steps": 2}
    rows = metrics.read(trained(settings(tmp_path, "null", **waiting), *STREAM))
    assert ["actor/grad_norm" in row for row in rows if "reward/mean" in row] == [False, True]
