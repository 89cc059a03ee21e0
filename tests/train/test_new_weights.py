"""Runs whose weights change while responses are sampled, with `rollout.on_new_weights=continue`."""

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from rlcore.contracts.actor import ActorWorker
from rlcore.engines.hf.sample.decode import Decoder
from rlcore.errors import ConfigError, PlanError
from rlcore.plugins.planning import plan_run
from rlcore.report import metrics
from rlcore.runtime.launch import launch
from rlcore.testing import write_prompts
from rlcore.testing.null_decoding import log_softmax
from rlcore.testing.tiny import random_batch, write_tiny_model
from rlcore.train import train
from rlcore.types import Completion, GenerateRequest, Lane, Sampling

REWARDS = """
async def vowels(trajectory):
    return sum(letter in "aeiou" for letter in trajectory.text()) / 12
"""
STRANGE = """
RLCORE_API = "1"
from rlcore import RolloutWorker, WorkerClass, hookimpl
from rlcore.testing.null import NullReplica

class Replica(NullReplica):
    pass

@hookimpl
def rlcore_worker_classes():
    return [WorkerClass(RolloutWorker, "strange", Replica, isolated=True)]
"""
KEEPING = (
    "schedule.max_staleness=3",
    "rollout.on_new_weights=continue",
    "schedule.old_logprobs=behaviour",
    "train.record_tokens=all",
)


def settings_in(directory: Path, backend: str) -> dict[str, Any]:
    (directory / "rewards.py").write_text(REWARDS)
    return {
        "model": {"path": "", "tokenizer": "bytes"},
        "data": {"sources": {"train": {"path": str(write_prompts(directory / "prompts.jsonl", 30))}}},
        "rollout": {"backend": backend, "samples_per_prompt": 2, "max_tokens": 60, "stop": [*"aeiouxyz"]},
        "reward": {"functions": {"vowels": {"fn": f"{directory}/rewards.py:vowels"}}},
        "actor": {"backend": backend.removesuffix("_replica"), "lr": 0.1, "minibatch_prompts": 2},
        "train": {"prompts_per_step": 4, "max_steps": 5, "dir": str(directory / "runs"), "name": "run"},
        "checkpoint": {"every_steps": 1, "keep": 10},
        "cluster": {"threads": 1},
    }


def rows_of(run_dir: Path, step: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The trajectories of a step, each with its arrays of tokens."""
    rows = [row for row in metrics.read_trajectories(run_dir, step) if row["lane"] == "train"]
    arrays = load_file(run_dir / "tokens" / f"step_{step:06d}.train.safetensors")
    spans = [slice(*ends) for ends in pairwise(arrays.pop("row_start").tolist())]
    return [(row, {name: array[span] for name, array in arrays.items()}) for row, span in zip(rows, spans, strict=True)]


def check_versions(rows: list[dict[str, Any]]) -> None:
    """Within a response versions never fall, and some response has several."""
    versions = [[version for _, version in row["versions"]] for row in rows]
    assert all(row == sorted(row) for row in versions)
    assert any(len(set(row)) > 1 for row in versions), "no weights arrived while a response was sampled"


@pytest.mark.slow
def test_each_token_has_the_version_and_the_log_prob_of_the_weights_that_sampled_it(tmp_path: Path) -> None:
    """The null policy is one softmax, kept with every checkpoint, so a token's log-prob can be computed again."""
    config = settings_in(tmp_path, "null_replica")
    config["plugins"] = {"null": {"token_s": 0.01}}
    run_dir = train(config, *KEEPING, plugins=["null"]).run_dir
    logprobs_V = {0: log_softmax(np.zeros(257), 1.0)}
    for step in range(1, 6):
        saved = run_dir / "checkpoints" / f"step_{step}" / "model" / "logits_V.npy"
        logprobs_V[step] = log_softmax(np.load(saved), 1.0)
    found = [(step, *row) for step in range(1, 6) for row in rows_of(run_dir, step)]
    check_versions([row for _, row, _ in found])
    for step, row, arrays in found:
        oldest = min(version for _, version in row["versions"])
        assert step - 1 - oldest <= 3, "staleness is counted from the oldest version"
        ends = [start for start, _ in row["versions"][1:]] + [row["num_tokens"]]
        for (start, version), end in zip(row["versions"], ends, strict=True):
            expected = logprobs_V[version][arrays["token_id"][start:end]]
            np.testing.assert_allclose(arrays["logprob"][start:end], expected, atol=1e-5)
        assert "old_logprob" not in arrays, "pi_old is what was recorded"


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["continue", "restart"])
def test_the_embedded_sampler_computes_nothing_again_where_it_keeps_its_cache(
    setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update and its publication while a response is sampled, in the workers of a run."""
    rows_again: list[int] = []
    computed = Decoder._own_hidden

    def counting(decoder: Decoder, first: int, done: Sequence[int]) -> Any:
        rows_again.append(len(decoder.rows))
        return computed(decoder, first, done)

    async def story() -> Completion:
        overrides = ("schedule.max_staleness=3", f"rollout.on_new_weights={setting}")
        async with launch(plan_run([config], overrides), tmp_path / "run") as run:
            monkeypatch.setattr(Decoder, "_own_hidden", counting)
            requests = [
                GenerateRequest(name, (65, 66), Sampling(max_tokens=tokens), 1, 0)
                for name, tokens in (("a", 1), ("b", 100))
            ]
            async for completion in run.generator.generate(requests, Lane.TRAIN):
                if completion.request_id == "b":
                    return completion
                await run.actor.replicas[0].call(ActorWorker.update, random_batch())
                await run.publish(1)
        raise ValueError("no completion of request b")

    config = settings_in(tmp_path, "hf")
    config["model"]["path"] = str(write_tiny_model(tmp_path / "tiny"))
    completion = asyncio.run(story())
    assert [version for _, version in completion.versions] == [0, 1]
    assert rows_again == ([1] if setting == "restart" else [])


def test_schedules_and_engines_without_it_are_refused_in_a_line(tmp_path: Path) -> None:
    config = settings_in(tmp_path, "null")
    for staleness in (0, 1):
        settings = (f"schedule.max_staleness={staleness}", "rollout.on_new_weights=continue")
        with pytest.raises(ConfigError, match=r"rollout\.on_new_weights.*schedule\.max_staleness not in \(0, 1\)"):
            plan_run([config], settings, ["null"])
    strange = tmp_path / "strange.py"
    strange.write_text(STRANGE)
    with pytest.raises(PlanError) as caught:
        plan_run([config], [*KEEPING, "rollout.backend=strange"], ["null", str(strange)])
    line = str(caught.value)
    assert "rollout.on_new_weights=continue: Replica of plugin 'strange'" in line
    assert line.endswith("choose rollout.on_new_weights=restart, or rollout.backend=hf")
