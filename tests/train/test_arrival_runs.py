"""Whole runs in which one plugin hands over what it must not: each ends in its first step, by the plugin's name."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlcore.errors import CheckpointError, PluginError, RlcoreError, WorkerError
from rlcore.report import metrics
from rlcore.testing.runs import run_settings
from rlcore.train import train

ODD = """
RLCORE_API = "1"
import asyncio
import os
from contextlib import aclosing
from dataclasses import dataclass, replace

import numpy as np

from rlcore.contracts.actor import ACTOR, ActorWorker
from rlcore.contracts.agents import AgentLoop
from rlcore.agents.single_turn import build_single_turn
from rlcore.contracts.critic import CriticEngine
from rlcore.contracts.hooks import hookimpl
from rlcore.contracts.components import Component
from rlcore.config.providers import ConfigSection
from rlcore.contracts.offers import WorkerClass
from rlcore.contracts.reference import ReferenceWorker
from rlcore.contracts.reward_manager import RewardManager
from rlcore.contracts.rollout import RolloutWorker
from rlcore.testing.null import NullActor, NullReference, NullRollout
from rlcore.testing.null_settings import NullSection
from rlcore.testing.null_critic import NullCritic
from rlcore.types import Lane, Reward, ScoredTrajectory


@dataclass(frozen=True)
class Odd(NullSection):
    mode: str = ""


def mode(context):
    return context.section.mode if context.section else ""


class OddActor(NullActor):
    def __init__(self, context):
        super().__init__(context)
        self.mode = mode(context)

    def update(self, minibatch):
        done = super().update(minibatch)
        return {"update None": None, "update text": {"actor/loss": "low"}}.get(self.mode, done)

    async def write_snapshot(self, directory):
        await super().write_snapshot(directory)
        if self.mode == "save state":
            (directory / "state.json").write_text("{}")


class OddReference(NullReference):
    def logprobs(self, batch):
        found = super().logprobs(batch)
        return found * np.nan if mode(self.context) == "reference nan" else found


class OddRollout(NullRollout):
    async def generate(self, requests):
        async with aclosing(super().generate(requests)) as completions:
            async for completion in completions:
                if mode(self.context) == "vocabulary":
                    completion = replace(completion, token_ids=completion.token_ids + 257)
                yield None if mode(self.context) == "rollout None" else completion


class OddAgent(AgentLoop):
    def __init__(self, context):
        self.inner, self.mode = build_single_turn(context), mode(context)

    async def rollout(self, tasks, sampling, lane):
        sampling = replace(sampling, temperature=0.5) if self.mode == "agent sampling" else sampling
        lane = Lane.EVAL if self.mode == "agent lane" else lane
        async for trajectory in self.inner.rollout(tasks, sampling, lane):
            if self.mode == "agent logprobs":
                trajectory = replace(trajectory, logprobs=trajectory.logprobs + 10)
            yield None if self.mode == "agent None" else trajectory


class OddManager(RewardManager):
    def __init__(self, context):
        self.mode = mode(context)

    async def score(self, stream, lane):
        async for row in stream:
            yield None if self.mode == "manager None" else ScoredTrajectory(row, Reward(float(row.id.sample)))


class OddCritic(CriticEngine):
    def __init__(self, context):
        self.mode, self.updates = mode(context), 0

    async def values(self, batch):
        shape = batch.tokens.loss_mask_BT.shape
        value = np.nan if self.mode == "critic nan" else 0.5
        return None if self.mode == "critic None" else np.full(shape, value, np.float32)

    async def update(self, minibatch):
        self.updates += 1
        odd = self.mode == "critic update None" or (self.mode == "critic late" and self.updates == 2)
        return None if odd else {"critic/loss": 1.0}

    def actor_may_update(self):
        return True

    async def save(self, directory):
        assert directory.is_dir() and not list(directory.iterdir())
        (directory / "state.json").write_text(str(self.updates))
        (directory / "model").mkdir()
        (directory / "model" / "config.json").write_text("critic")

    async def restore(self, directory):
        self.updates = int((directory / "state.json").read_text())
        print("critic restored", self.updates)


@hookimpl
def rlcore_config_sections():
    return [ConfigSection("odd", Odd)]


@hookimpl
def rlcore_agent_loops():
    return [Component("odd", OddAgent)]


@hookimpl
def rlcore_reward_managers():
    return [Component("odd", OddManager)]


@hookimpl
def rlcore_critic_engines():
    return [Component("odd", OddCritic)]


@hookimpl
def rlcore_worker_classes():
    return [
        WorkerClass(ActorWorker, "odd", OddActor),
        WorkerClass(ReferenceWorker, "odd", OddReference),
        WorkerClass(RolloutWorker, "odd", OddRollout, embedded_in=ACTOR),
    ]
"""
WORKERS = {"actor.backend": "odd", "rollout.backend": "odd"}
AGENT = {"rollout.agent": "odd"}
PPO = {"critic.engine": "odd", "algo.preset": "ppo"}


def odd_run(tmp_path: Path, mode: str, chosen: dict[str, Any], *, resume: bool = False, **more: Any) -> Path:
    """A run in which the plugin `odd` fills what `chosen` says."""
    (tmp_path / "odd.py").write_text(ODD)
    settings = run_settings(tmp_path, 12) | {"train.name": "odd", "train.max_steps": 5} | chosen | more
    if "reward.manager" in chosen:
        settings = {key: value for key, value in settings.items() if not key.startswith("reward.functions.")}
    overrides = [f"{key}={value}" for key, value in (settings | {"plugins.odd.mode": mode}).items()]
    return train({}, *overrides, plugins=["null", str(tmp_path / "odd.py")], resume=resume).run_dir


RUNS: dict[str, tuple[dict[str, Any], type[RlcoreError], str]] = {
    "critic nan": (PPO, PluginError, r"critic 'odd' of plugin 'odd' .*values\(\): \d+ of \d+ values are not finite"),
    "critic None": (PPO, PluginError, r"critic 'odd' of plugin 'odd' .*values\(\) returned None; needs a numpy array"),
    "critic update None": (PPO, PluginError, r"critic 'odd' of plugin 'odd' .*update\(\) returned None; needs a dict"),
    "agent None": (AGENT, PluginError, r"agent 'odd' of plugin 'odd' .*rollout\(\) yielded None; needs Trajectory"),
    "agent logprobs": (AGENT, PluginError, r"agent 'odd' of plugin 'odd' .*rollout\(\): trajectory .*log-prob"),
    "agent sampling": (
        AGENT,
        PluginError,
        r"agent 'odd' of plugin 'odd' .*rollout\(\): request '.*' in the lane 'train' has temperature=0\.5, top_p=1, "
        r"top_k=0, min_p=0; needs temperature=1, top_p=1, top_k=0, min_p=0; pass on the `lane` and the `sampling`",
    ),
    "agent lane": (AGENT, PluginError, r"agent 'odd' of plugin 'odd' .*in the lane 'eval' has .*; needs another lane"),
    "manager None": (
        {"reward.manager": "odd"},
        PluginError,
        r"reward 'odd' of plugin 'odd' .*score\(\) yielded None; needs ScoredTrajectory",
    ),
    "update None": (WORKERS, WorkerError, r"actor\[0\]\.update\(\) returned None; needs dict"),
    "update text": (WORKERS, WorkerError, r"actor\[0\]\.update\(\) returned 'actor/loss': 'low'; needs"),
    "reference nan": (
        {"reference.backend": "odd", "algo.kl.placement": "loss"},
        WorkerError,
        r"reference\[0\]\.logprobs\(\): \d+ of \d+ log-probs are not finite",
    ),
    "vocabulary": (WORKERS, WorkerError, r"rollout\[0\]\.generate\(\): sample .*token id \d+; needs 0 to 256"),
    "rollout None": (WORKERS, WorkerError, r"rollout\[0\]\.generate\(\) yielded None; needs Completion"),
    "save state": (
        WORKERS | {"checkpoint.every_steps": 1},
        CheckpointError,
        "actor: it saved 'state.json', which the checkpoint writes itself",
    ),
}


@pytest.mark.parametrize("mode", RUNS)
def test_a_run_ends_in_its_first_step_by_the_name_of_who_hands_over_what_it_must_not(tmp_path: Path, mode: str) -> None:
    chosen, error, message = RUNS[mode]
    with pytest.raises(error, match=message) as caught:
        odd_run(tmp_path, mode, chosen)
    assert "\n" not in str(caught.value)
    assert (f"of plugin 'odd' ({tmp_path / 'odd.py'} API 1)" in str(caught.value)) == (error is not CheckpointError)
    taken = len(metrics.read(tmp_path / "runs" / "odd"))
    assert 1 <= taken < 5 if mode == "save state" else taken == 0, "steps continue while a checkpoint is written"


@pytest.mark.slow
@pytest.mark.parametrize(
    "chosen", [PPO, AGENT, WORKERS, {"reward.manager": "odd"}], ids=["critic", "agent", "workers", "rewards"]
)
def test_the_same_run_with_nothing_wrong_takes_every_step(tmp_path: Path, chosen: dict[str, Any]) -> None:
    assert [duration["step"] for duration in metrics.read(odd_run(tmp_path, "", chosen))] == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_a_critic_has_a_separate_directory_in_the_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = odd_run(tmp_path, "", PPO, **{"train.max_steps": 2})
    checkpoint = run / "checkpoints" / "step_2"
    assert (checkpoint / "critic" / "state.json").read_text() == "2"
    assert json.loads((checkpoint / "state.json").read_text())["step"] == 2
    assert json.loads((checkpoint / "model" / "config.json").read_text())["model_type"] == "null"
    odd_run(tmp_path, "", PPO, resume=True, **{"train.max_steps": 3})
    assert "critic restored 2" in capsys.readouterr().out
    assert (run / "checkpoints" / "step_3" / "critic" / "state.json").read_text() == "3"


@pytest.mark.slow
def test_an_error_of_a_plugin_names_the_last_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(
        PluginError, match=r"update\(\) returned None.*last checkpoint: .*step_1, continue with --resume"
    ):
        odd_run(tmp_path, "critic late", PPO, **{"checkpoint.every_steps": 1})
