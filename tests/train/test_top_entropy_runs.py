"""Runs whose policy loss trains the tokens of highest entropy: what they record, and an actor without entropies."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import rlcore
from rlcore.errors import WorkerError
from rlcore.report import metrics
from rlcore.testing.runs import run_settings
from rlcore.testing.tiny import write_tiny_model

pytestmark = pytest.mark.slow

SHARE = 0.25
PLUGIN = """
from rlcore import RolloutWorker, WorkerClass, hookimpl
from rlcore.contracts.actor import ACTOR, ActorWorker
from rlcore.testing.null import NullActor, NullRollout
from rlcore.types import TokenScores

RLCORE_API = "1"


class Actor(NullActor):
    def token_scores(self, batch):
        return TokenScores(self.logprobs(batch))


@hookimpl
def rlcore_worker_classes():
    return [
        WorkerClass(ActorWorker, "plain", Actor),
        WorkerClass(RolloutWorker, "plain", NullRollout, embedded_in=ACTOR),
    ]
"""


def settings_of(directory: Path, **more: Any) -> dict[str, Any]:
    (directory / "rewards.py").write_text("def high(trajectory):\n    return float(trajectory.token_ids[-6:].mean())\n")
    return run_settings(
        directory,
        32,
        **{
            "reward.functions.letters.fn": f"{directory / 'rewards.py'}:high",
            "model.path": str(write_tiny_model(directory / "tiny")),
            "actor.backend": "hf",
            "rollout.backend": "hf",
            "rollout.samples_per_prompt": 4,
            "train.prompts_per_step": 4,
            "actor.lr": 0.01,
            "actor.minibatch_prompts": 2,
            "cluster.threads": 1,
            "algo.top_entropy_quantile": SHARE,
            "train.record_tokens": "all",
            "train.name": "run",
            **more,
        },
    )


def taught(run_dir: Path, step: int) -> list[tuple[str, list[float], list[bool], float]]:
    """Of each trajectory: its prompt, the entropies of its sampled tokens, whether each has an advantage, the row's."""
    arrays = load_file(run_dir / "tokens" / f"step_{step:06d}.train.safetensors")
    rows = [row for row in metrics.read_trajectories(run_dir, step) if row["lane"] == "train"]
    starts, found = arrays["row_start"].tolist(), []
    for row, begin, end in zip(rows, starts, starts[1:], strict=False):
        sampled = arrays["sampled"][begin:end] == 1
        advantages, entropies = (arrays[name][begin:end][sampled] for name in ("advantage", "entropy"))
        assert set(advantages.tolist()) <= {0.0, np.float32(row["advantage"])}
        found.append((row["id"]["prompt"], entropies.tolist(), (advantages != 0).tolist(), row["advantage"]))
    return found


def least_of(rows: list[tuple[str, list[float], list[bool], float]]) -> float | None:
    """The least of the highest entropies of all rows, if the tokens with these are those that have an advantage."""
    entropies = sorted((entropy for _, found, _, _ in rows for entropy in found), reverse=True)
    least = entropies[math.ceil(SHARE * len(entropies)) - 1]
    assert entropies[0] > least > entropies[-1]
    assert any(advantage for _, _, _, advantage in rows)
    same = [has == [entropy >= least and advantage != 0 for entropy in found] for _, found, has, advantage in rows]
    return least if all(same) else None


def test_the_tokens_of_a_step_with_the_highest_entropies_have_the_advantage_of_their_row(tmp_path: Path) -> None:
    result = rlcore.train(settings_of(tmp_path))
    of_steps = [row["policy/top_entropy"] for row in metrics.read(result.run_dir) if "policy/top_entropy" in row]
    assert of_steps == pytest.approx([least_of(taught(result.run_dir, step)) for step in (1, 2)])


def test_streamed_mini_batches_choose_each_among_their_own_tokens(tmp_path: Path) -> None:
    result = rlcore.train(settings_of(tmp_path, **{"schedule.stream_minibatches": True, "train.max_steps": 1}))
    rows = taught(result.run_dir, 1)
    prompts = list(dict.fromkeys(prompt for prompt, _, _, _ in rows))
    divisions = [
        [least_of([row for row in rows if (row[0] in pair) is inside]) for inside in (True, False)]
        for pair in ({prompts[0], other} for other in prompts[1:])
    ]
    [(first, second)] = [division for division in divisions if None not in division]
    assert first is not None
    assert second is not None
    [found] = [row["policy/top_entropy"] for row in metrics.read(result.run_dir) if "policy/top_entropy" in row]
    assert found == pytest.approx((first + second) / 2)


def test_the_choice_does_not_depend_on_what_is_recorded(tmp_path: Path) -> None:
    losses = []
    for recorded in ("all", "none"):
        result = rlcore.train(settings_of(tmp_path, **{"train.record_tokens": recorded, "train.name": recorded}))
        losses.append([row["policy/loss"] for row in metrics.read(result.run_dir) if "policy/loss" in row])
    assert losses[0] == losses[1]
    assert any(losses[0])


def test_an_actor_without_entropies_ends_the_run_in_one_line(tmp_path: Path) -> None:
    plugin = tmp_path / "plain.py"
    plugin.write_text(PLUGIN)
    backends = {"actor.backend": "plain", "rollout.backend": "plain", "algo.top_entropy_quantile": SHARE}
    with pytest.raises(
        WorkerError,
        match=r"token_scores\(\) returned no entropies; algo\.top_entropy_quantile=0\.25 .* choose 1, or an actor that",
    ):
        rlcore.train(run_settings(tmp_path, 8, **backends), plugins=["null", str(plugin)])
