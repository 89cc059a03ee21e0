"""Whole PPO runs: both learn, a warm-up, one trunk for two, and going on bit for bit."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlcore.errors import WorkerError
from rlcore.report import metrics
from rlcore.testing import write_prompts
from rlcore.testing.runs import differing
from rlcore.testing.tiny import write_tiny_model
from rlcore.train import train

pytestmark = pytest.mark.usefixtures("rewards_in_process")

REWARDS = """
from rlcore import Reward
import numpy

async def evens(trajectory):
    return float((trajectory.token_ids[trajectory.loss_mask] % 2 == 0).mean())

async def by_token(trajectory):
    scores = numpy.where(trajectory.loss_mask, trajectory.token_ids % 2 / 8, 0).astype(numpy.float32)
    return Reward(score=0.0, token_scores=scores)
"""


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    """PPO without torch's models: policy and critic of the plugin `null`."""
    (tmp_path / "rewards.py").write_text(REWARDS)
    return {
        "model": {"path": "none", "tokenizer": "bytes"},
        "data": {"sources": {"train": {"path": str(write_prompts(tmp_path / "prompts.jsonl", 20, "{index}"))}}},
        "rollout": {"samples_per_prompt": 2, "max_tokens": 6, "backend": "null"},
        "reward": {"functions": {"evens": {"fn": f"{tmp_path / 'rewards.py'}:evens"}}},
        "algo": {"preset": "ppo"},
        "actor": {"lr": 0.01, "minibatch_prompts": 2, "backend": "null"},
        "plugins": {"critic_engine": {"backend": "null"}, "null": {}},
        "train": {"prompts_per_step": 4, "max_steps": 4, "dir": str(tmp_path / "runs"), "name": "whole"},
        "checkpoint": {"every_steps": 2},
        "cluster": {"threads": 1},
    }


@pytest.fixture
def real(config: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """The same with a tiny transformers model for both."""
    config["model"]["path"] = str(write_tiny_model(tmp_path / "tiny", num_key_value_heads=2))
    config["rollout"]["backend"] = config["actor"]["backend"] = "hf"
    config["plugins"] = {"critic_engine": {"lr": 0.003}}
    return config


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [row for row in metrics.read(run) if "reward/mean" in row]


def halves(config: dict[str, Any], *overrides: str) -> Path:
    """A run that ends after two steps and is resumed to four."""
    train(config, "train.name=halves", "train.max_steps=2", *overrides)
    return train(config, "train.name=halves", *overrides, resume=True).run_dir


@pytest.mark.slow
def test_a_run_without_torch_resumes_bit_for_bit_and_its_critic_improves(config: dict[str, Any]) -> None:
    whole = train(config).run_dir
    assert differing(whole, halves(config)) == []
    losses = [row["critic/loss"] for row in rows_of(whole)]
    assert losses[-1] < losses[0]
    assert (whole / "checkpoints" / "step_4" / "critic" / "values.json").is_file()


@pytest.mark.fault
def test_the_actor_waits_for_the_critic_and_a_restart_does_not_make_it_wait_again(config: dict[str, Any]) -> None:
    waits = "plugins.critic_engine.actor_waits_updates=3"  # of two updates per step
    whole = train(config, waits).run_dir
    assert [row["critic/warming_up"] for row in rows_of(whole)] == [1.0, 0.5, 0.0, 0.0]
    assert ["actor/grad_norm" in row for row in rows_of(whole)] == [False, True, True, True]
    assert differing(whole, halves(config, waits)) == []


@pytest.mark.slow
def test_the_critics_schedule_continues_where_the_run_is_after_a_resume_with_fewer_updates(
    real: dict[str, Any],
) -> None:
    falling = ("plugins.critic_engine.lr_schedule=linear", "plugins.critic_engine.actor_waits_updates=2")
    train(real, *falling, "actor.lr_schedule=linear", "actor.epochs=2", stop_when=lambda step, _: step == 2)
    resumed = train(real, *falling, "actor.lr_schedule=linear", resume=True).run_dir
    last = rows_of(resumed)[-1]  # its two updates are those at 6 and 7 of 8, and at 4 and 5 of the actor's 6
    assert last["critic/lr"] == pytest.approx(0.003 * 1.5 / 8)
    assert last["actor/lr"] == pytest.approx(0.01 * 1.5 / 6)


def test_only_a_run_with_a_critic_has_metrics_of_one(config: dict[str, Any]) -> None:
    config["plugins"] = {"null": {}}
    run = train(config, "algo.preset=grpo", "train.max_steps=1").run_dir
    assert [name for row in metrics.read(run) for name in row if name.startswith("critic/")] == []
    assert not (run / "checkpoints" / "step_1" / "critic").exists()


@pytest.mark.slow
def test_a_run_trains_both_models_and_tells_of_the_critic(real: dict[str, Any]) -> None:
    run = train(real, "train.max_steps=2").run_dir
    named = ("loss", "clip_frac", "explained_variance", "value_mean", "return_mean", "grad_norm", "lr")
    for row in rows_of(run):
        assert {f"critic/{name}" for name in named} <= row.keys()
        assert row["critic/grad_norm"] > 0
        assert row["actor/grad_norm"] > 0
    critic = run / "checkpoints" / "step_2" / "critic" / "model"
    assert {"config.json", "model.safetensors", "value_head.safetensors"} <= {path.name for path in critic.iterdir()}


@pytest.mark.slow
def test_a_critic_that_diverges_ends_the_run_by_name_before_the_policy_is_updated_on_it(real: dict[str, Any]) -> None:
    with pytest.raises(WorkerError, match=r"critic.*not finite.*nothing was updated"):
        train(real, "plugins.critic_engine.lr=1e38", "actor.minibatch_prompts=0")
    assert [row["step"] for row in rows_of(Path(real["train"]["dir"]) / "whole")] == [1]


VARIANTS = {
    "whole": (),
    "schedules": (
        "actor.lr_schedule=cosine",
        "actor.epochs=2",
        "plugins.critic_engine.lr_schedule=linear",
        "plugins.critic_engine.warmup_steps=2",
        "plugins.critic_engine.actor_waits_updates=3",
    ),
    "kl and token rewards": (
        "algo.kl.placement=reward",
        "algo.kl.controller=adaptive",
        "algo.kl.target=0.01",
        "algo.gamma=0.99",
        "algo.whiten_advantages=false",
    ),
    "adapters": ("plugins.critic_engine.lora.enabled=true", "plugins.critic_engine.lora.rank=2"),
    "head on the actor": ("plugins.critic_engine.trunk=actor",),
    "adapters on an actor with adapters": (
        "plugins.critic_engine.trunk=actor",
        "plugins.critic_engine.lora.enabled=true",
        "plugins.critic_engine.lora.dropout=0.2",
        "actor.lora.enabled=true",
        "actor.lora.dropout=0.2",
    ),
}


@pytest.mark.fault
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_resumed_run_equals_one_that_was_never_interrupted(
    real: dict[str, Any], tmp_path: Path, variant: str
) -> None:
    if variant == "kl and token rewards":
        real["reward"]["functions"]["tokens"] = {"fn": f"{tmp_path / 'rewards.py'}:by_token"}
    whole = train(real, *VARIANTS[variant]).run_dir
    if variant == "schedules":  # both end with the run, so half a run is another one
        train(real, "train.name=halves", *VARIANTS[variant])
        for name in ("latest", "step_4"):
            _remove(whole.parent / "halves" / "checkpoints" / name)
        (whole.parent / "halves" / "checkpoints" / "latest").write_text("step_2\n")
        other = train(real, "train.name=halves", *VARIANTS[variant], resume=True).run_dir
    else:
        other = halves(real, *VARIANTS[variant])
    assert differing(whole, other) == []
    assert all(np.isfinite(row["critic/loss"]) for row in rows_of(whole))


def test_minibatches_with_only_truncated_rows_are_skipped_and_reported(config: dict[str, Any]) -> None:
    run = train(config, "algo.overlong=mask", "rollout.max_tokens=1", "train.max_steps=1").run_dir
    [row] = rows_of(run)
    assert row["actor/skipped"] == 1.0
    assert "actor/grad_norm" not in row


WATCHED = """
RLCORE_API = "1"
import json
from rlcore.contracts.critic import CriticWorker
from rlcore.contracts.hooks import hookimpl
from rlcore.contracts.offers import WorkerClass
from rlcore.testing.null_critic import NullCritic, _places

class Watched(NullCritic):
    def note(self, **entry):
        with (self.context.run_dir / "watched.jsonl").open("a") as file:
            file.write(json.dumps(entry) + chr(10))

    def values(self, batch):
        self.note(event="values", table=self.values_L.tolist())
        return super().values(batch)

    def update(self, minibatch):
        mask_BT = minibatch.tokens.loss_mask_BT
        places, values = _places(minibatch)[mask_BT], minibatch.values_BT[mask_BT]
        self.note(event="update", table=self.values_L.tolist(), places=places.tolist(), values=values.tolist())
        return super().update(minibatch)

@hookimpl
def rlcore_worker_classes():
    return [WorkerClass(CriticWorker, "watched", Watched)]
"""


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, pytest.param(False, marks=pytest.mark.fault)])
def test_one_step_off_policy_every_update_of_a_step_sees_the_values_of_its_start(
    config: dict[str, Any], tmp_path: Path, stream: bool
) -> None:
    (tmp_path / "watch.py").write_text(WATCHED)
    config["plugins"]["critic_engine"]["backend"] = "watched"
    config["algo"]["whiten_advantages"] = False
    config["schedule"] = {"max_staleness": 1, "stream_minibatches": stream}
    config["train"]["max_steps"], config["checkpoint"]["every_steps"] = 3, 0
    run = train(config, plugins=[str(tmp_path / "watch.py")]).run_dir
    noted = [json.loads(line) for line in (run / "watched.jsonl").read_text().splitlines()]
    updates = [note for note in noted if note["event"] == "update"]
    assert len(updates) == 3 * 2
    for first, second in zip(updates[::2], updates[1::2], strict=True):
        start = np.array(first["table"])
        assert second["table"] != first["table"]  # the step's first update moved the critic
        for update in (first, second):
            assert update["values"] == pytest.approx(start[update["places"]].tolist(), abs=1e-6)
    assert updates[0]["table"] != updates[2]["table"]
    events = "".join(note["event"][0] for note in noted)
    assert re.fullmatch(r"(v+uu){3}", events), events  # no pass of a step after its first update, none before its turn


def _remove(path: Path) -> None:
    import shutil

    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
