"""Case 24 of the scorecard, on Ray and on one machine: keys and values of other weights.

With the Python of .venv-vllm (`make vllm`).

A replica keeps them apart twice: it salts its prefix cache with the version of the weights, and empties it when new
ones arrive. Here vLLM's scheduler loses one guard in one step, the other in another, and both in the last, which shows
that there was a cache to go stale in every step, and what is said of one that has.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from rlcore.report import metrics
from rlcore.testing.marks import needs
from rlcore.testing.tiny import write_tiny_model

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(330),
    pytest.mark.xdist_group("stale prefixes"),
    needs("vllm", "`make setup-vllm`, then .venv-vllm/bin/python -m pytest -m real"),
]

DEADLINE_S = 300.0
NUM_STEPS = 5
SCHEDULER = '''
"""vLLM's scheduler, which from some version of the weights on sees no salts, and keeps some of what it is to drop."""

from vllm.v1.core.sched.async_scheduler import AsyncScheduler


class Careless(AsyncScheduler):
    version = 0

    def add_request(self, request):
        self.version = int(request.cache_salt.removeprefix("version "))
        if self.version >= 3:
            request.cache_salt, request.block_hashes = None, []
            request.update_block_hashes()
        super().add_request(request)

    def reset_prefix_cache(self, *args, **kwargs):
        return True if self.version in (1, 3) else super().reset_prefix_cache(*args, **kwargs)
'''
REWARD = '''
"""A score that differs between samples, so that every step moves the policy."""


def spread(prompts, completions, **columns):
    return [float(sum(map(ord, str(completion))) % 7) for completion in completions]
'''


@dataclass(frozen=True)
class StaleRun:
    """A run that has ended."""

    directory: Path
    code: int
    output: str


def stale_run(directory: Path, *more: str) -> StaleRun:
    """Train on prompts that are the same in every step, and longer than the blocks of the cache."""
    write_tiny_model(directory / "tiny", num_attention_heads=1)
    (directory / "careless.py").write_text(SCHEDULER)
    (directory / "spread.py").write_text(REWARD)
    prompts = [{"prompt": f"{n} times the same. " * 6, "answer": ""} for n in range(2)]
    (directory / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    engine = {"scheduler_cls": "careless.Careless", "block_size": 32}
    values = {
        "model.path": directory / "tiny",
        "model.tokenizer": "bytes",
        "data.sources.all.path": directory / "prompts.jsonl",
        "reward.functions.spread.fn": f"{directory / 'spread.py'}:spread",
        "rollout.backend": "vllm",
        "rollout.samples_per_prompt": 4,
        "rollout.max_tokens": 16,
        "plugins.vllm.kv_cache_gib": 0.1,
        "plugins.vllm.enforce_eager": "true",
        "plugins.vllm.options": json.dumps(engine),
        "actor.lr": 5e-2,
        "cluster.threads": 1,
        "train.prompts_per_step": 2,
        "train.max_steps": NUM_STEPS,
        "train.dir": directory,
        "train.name": "run",
        "checkpoint.every_steps": 0,
        "checkpoint.at_end": "false",
    }
    command = [sys.executable, "-m", "rlcore", "train", *(f"{key}={value}" for key, value in values.items()), *more]
    path = os.pathsep.join(filter(None, [str(directory), os.environ.get("PYTHONPATH")]))
    with (directory / "output").open("w") as output:
        done = subprocess.run(
            command,
            cwd=directory,
            env={**os.environ, "PYTHONPATH": path},
            stdout=output,
            stderr=output,
            timeout=DEADLINE_S,
            check=False,
        )
    return StaleRun(directory / "run", done.returncode, " ".join((directory / "output").read_text().split()))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> StaleRun:
    """A run on Ray that does not check weights at hand-overs, and so continues with what it samples."""
    on_ray = "plugins.ray.object_store_gib=0.1"
    ended = stale_run(tmp_path_factory.mktemp("stale"), on_ray, "rollout.check_weights_every=0")
    assert ended.code == 0, ended.output[-4000:]
    return ended


def differences(run: StaleRun) -> list[float]:
    """By step, how far log-probs of vLLM and of the actor are apart."""
    return [row["policy/rollout_logprob_diff"] for row in metrics.read(run.directory) if "reward/mean" in row]


def test_a_run_that_checks_weights_ends_at_the_hand_over_after_which_the_cache_is_stale(tmp_path: Path) -> None:
    ended = stale_run(tmp_path, "rollout.check_weights_every=16")
    assert ended.code == 2, ended.output[-4000:]
    assert f"with version {NUM_STEPS - 1} of the weights, where at most" in ended.output
    assert "it samples with other weights" in ended.output
    assert len(differences(ended)) == NUM_STEPS - 1
    assert max(differences(ended)) < 1e-3, "nothing stale was trained on"


def test_either_guard_alone_keeps_prefixes_of_other_weights_out_of_what_is_sampled(run: StaleRun) -> None:
    *guarded, unguarded = differences(run)
    assert len(guarded) == NUM_STEPS - 1
    assert max(guarded) < 1e-3
    assert unguarded > 0.05, "without guards the cache is stale: the prompts are found in it"


def test_a_sampler_that_is_not_the_actors_policy_is_reported_in_the_step_where_it_happens(run: StaleRun) -> None:
    output = run.output
    sentence = "log-probs of rollout.backend=vllm and of the actor differ"
    found = f"{sentence} by {differences(run)[-1]:.3g} per token"
    assert output.count(sentence) == 2, "in its step, and with the last words of the run"
    assert f"warning: step {NUM_STEPS}: sampler and trainer differ: {found}" in output
    assert f"sampler and trainer differ in 1 of {NUM_STEPS} steps (step {NUM_STEPS}): {found}" in output
    assert "rollout.warn_logprob_diff=0.05" in output
    assert "look at the number formats of both" in output
