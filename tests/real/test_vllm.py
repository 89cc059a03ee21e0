"""Rollout replicas on vLLM: run with the Python of .venv-vllm (`make setup-vllm`)."""

import asyncio
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from rlcore.config import RunConfig
from rlcore.errors import WorkerError
from rlcore.testing.leaks import descendants, is_running
from rlcore.testing.marks import needs
from rlcore.testing.tiny import write_tiny_model
from rlcore.types import Completion, GenerateRequest, Sampling, WeightsHandle

if TYPE_CHECKING:
    from rlcore_vllm.sampler import VllmSampler

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(400),
    needs("vllm", "`make setup-vllm`, then .venv-vllm/bin/python -m pytest -m real"),
]

ROOT = Path(__file__).parent.parent.parent
EXAMPLE = ROOT / "examples" / "ray_vllm"
DEADLINE_S = 360.0
BATCH = 512
"""Tokens that the engine computes at a time, at most."""
SPREAD = "def spread(prompts, completions, **columns): return [float(sum(map(ord, str(x))) % 7) for x in completions]"
"""A reward that differs between samples, so that every step moves the policy."""


def run(
    directory: Path, *overrides: str, during: Callable[[set[int]], None] = lambda processes: None
) -> tuple[list[dict[str, float]], set[int]]:
    """The metrics of the example's steps, and the processes that were seen below it."""
    command = [sys.executable, "-m", "rlcore", "train", str(EXAMPLE / "config.yaml"), str(EXAMPLE / "ci_vllm.yaml")]
    # Every row is computed, also where a judge gives a group equal scores: log-probs are compared in each step.
    command += [f"train.dir={directory}", "train.name=run", "algo.entropy_coef=1e-9", *overrides]
    seen: set[int] = set()
    ends_at = time.monotonic() + DEADLINE_S
    with (directory / "said").open("w") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)
        try:
            while process.poll() is None and time.monotonic() < ends_at:
                now = descendants(process.pid)
                seen |= now
                during(now)
                time.sleep(0.2)
        finally:
            process.kill()
            process.wait()
    assert process.returncode == 0, (directory / "said").read_text()[-4000:]
    return steps_of(directory / "run"), seen


def steps_of(run: Path) -> list[dict[str, float]]:
    """The metrics of its steps."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "reward/mean" in row]


def test_on_ray_three_steps_are_judged_by_another_vllm_and_sampled_with_the_weights_of_each(tmp_path: Path) -> None:
    steps, seen = run(tmp_path, "--plugin", "ray")
    check(tmp_path, steps, 3)
    assert len(seen) > 4, "a replica has an engine and its worker below it"
    ends_at = time.monotonic() + 10.0  # a killed process gives back its gigabytes first
    while (left := [pid for pid in seen if is_running(pid)]) and time.monotonic() < ends_at:
        time.sleep(0.1)
    assert not left, "the engines' processes end with the run"


@pytest.mark.parametrize("weights", ["disk", "tcp"])
def test_an_engine_that_is_killed_comes_back_with_the_weights_and_what_it_owed_is_asked_again(
    tmp_path: Path, weights: str
) -> None:
    """Also with the actor training on the pools of both engines, which sleep meanwhile."""
    shared = ["cluster.train_pool=train", "cluster.pools.train.colocates=[rollout,reward]"]
    overrides = ["train.max_steps=2", f"rollout.weight_sync={weights}", *shared]
    killing = KillTheSampler(tmp_path / "run")
    steps, _ = run(tmp_path, *overrides, during=killing)
    check(tmp_path, steps, 2)
    for step in steps:
        assert {"time/drain_s", "time/admit_s"} <= step.keys()
        assert 0.0 < step["time/pool/reward/busy_frac"] <= 1.0
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "rollout[0]: restarted" in log
    assert "requests are asked again" in log
    assert "judge[0]: restarted" not in log
    assert killing.has_seen_files == (weights == "disk")


class KillTheSampler:
    """Kills the rollout's engine when the first step has been taken and the second samples."""

    def __init__(self, run: Path) -> None:
        self._metrics, self._log, self._done = run / "metrics.jsonl", run / "log.txt", False
        self._files = run / "weights"
        self.has_seen_files = False

    def __call__(self, processes: set[int]) -> None:
        self.has_seen_files |= self._files.exists()
        if self._done or not self._metrics.exists() or not self._metrics.read_text():
            return
        named = re.findall(r" rollout\[0\]: \(EngineCore pid=(\d+)\)", self._log.read_text())
        [engine] = set(map(int, named)) & processes
        os.kill(engine, signal.SIGKILL)
        self._done = True


def check(directory: Path, steps: list[dict[str, float]], num: int) -> None:
    """So many steps, whose samples came from the weights of each step and were judged once each."""
    assert len(steps) == num
    for number, step in enumerate(steps):
        assert math.isfinite(step["reward/mean"])
        assert 0.0 <= step["reward/graded/mean"] <= 10.0
        assert step["reward/failed"] == 0.0
        assert step["policy/rollout_logprob_diff"] < 1e-3, "vLLM samples from the actor's policy"
        assert step["schedule/staleness_max"] == 0.0
        rows = (directory / "run" / "trajectories" / f"step_{number + 1:06d}.jsonl").read_text().splitlines()
        assert {version for row in rows for _, version in json.loads(row)["versions"]} == {number}
    calls = [json.loads(line) for line in (directory / "run" / "reward_calls.jsonl").read_text().splitlines()]
    assert {(call["target"], call["status"]) for call in calls} == {("judge", "ok")}
    assert len(calls) == 8 * num, "every sample was judged once"


@pytest.mark.parametrize(("handed_over", "by"), [("merged", "disk"), ("adapter", "disk"), ("merged", "tcp")])
def test_a_replica_samples_with_the_weights_of_an_actor_that_trains_adapters(
    tmp_path: Path, handed_over: str, by: str
) -> None:
    """Step 1 moves the policy away from its base, which the reference is: were that sampled from, they would differ."""
    (tmp_path / "spread.py").write_text(SPREAD)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        "".join(json.dumps({"prompt": f"Tell me of the sea, {n}.", "answer": "e"}) + "\n" for n in range(4))
    )
    values = {
        "model.path": write_tiny_model(tmp_path / "tiny", num_attention_heads=1, tie_word_embeddings=True),
        "model.tokenizer": "bytes",
        "data.sources.all.path": prompts,
        "reward.functions.spread.fn": f"{tmp_path / 'spread.py'}:spread",
        "rollout.backend": "vllm",
        "rollout.samples_per_prompt": 4,
        "rollout.max_tokens": 8,
        "plugins.vllm.max_model_len": 128,
        "plugins.vllm.kv_cache_gib": 0.1,
        "plugins.vllm.enforce_eager": "true",
        "plugins.vllm.lora": handed_over,
        "rollout.weight_sync": by,
        "actor.lora.enabled": "true",
        "actor.lr": 5e-3,
        "algo.kl.placement": "loss",
        "algo.kl.coef": 1e-6,
        "train.prompts_per_step": 2,
        "train.max_steps": 2,
        "train.dir": tmp_path,
        "train.name": "run",
        "checkpoint.every_steps": 0,
        "checkpoint.at_end": "false",
        "cluster.threads": 1,
    }
    command = [sys.executable, "-m", "rlcore", "train"]
    command += [f"{key}={value}" for key, value in values.items()]
    done = subprocess.run(command, text=True, capture_output=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    first, second = steps_of(tmp_path / "run")
    assert first["policy/kl"] == pytest.approx(0.0, abs=1e-8), "an adapter begins as nothing"
    assert second["policy/kl"] > 1e-4
    for step in (first, second):
        assert step["policy/rollout_logprob_diff"] < 1e-3


def test_handed_over_weights_are_sampled_from_and_log_probs_are_those_of_the_policy(tmp_path: Path) -> None:
    """With another temperature than 1, and an output layer that is tied to the embedding; in a separate process."""
    command = [sys.executable, "-W", "ignore", __file__, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


async def sampled_with_other_weights(directory: Path) -> None:
    """Sample, hand over all weights times 1.02 in the middle of longer samples, and compare with transformers."""
    import torch
    from rlcore_vllm.engine import open_engine, rollout_arguments
    from rlcore_vllm.sampler import VllmSampler
    from transformers import AutoModelForCausalLM

    from rlcore.data.tokenizer import load_tokens
    from rlcore.plugins.planning import plan_run

    config = plan_run([EXAMPLE / "config.yaml"], []).config
    settings = config.plugins["vllm"]
    unknown_models_are_refused(config, directory)
    tokens = load_tokens(config.model, config.data.system_prompt)
    prompt = tokens.encode_prompt(({"role": "user", "content": "Tell me of the sea."},))
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)

    def difference(completion: Completion, begin: int, end: int | None) -> float:
        ids_T = torch.tensor([*prompt, *completion.token_ids.tolist()])
        with torch.no_grad():
            logprobs_TV = (model(ids_T[None]).logits[0] / 0.7).log_softmax(-1)
        expected_N = logprobs_TV[len(prompt) - 1 : -1].gather(1, ids_T[len(prompt) :, None])[:, 0].numpy()
        return float(np.abs(expected_N - completion.logprobs)[begin:end].mean())

    engine = open_engine(rollout_arguments(config, settings, "cpu") | {"max_num_batched_tokens": BATCH}, "test", 1)
    sampler = VllmSampler(engine, tokens, "test")
    try:
        model.save_pretrained(directory / "start")  # as a run does that is resumed before its first step
        assert await sampler.load_weights(WeightsHandle(0, "directory", str(directory / "start"))) == 0
        requests = [GenerateRequest("r", prompt, Sampling(temperature=0.7, max_tokens=8), 2, 5)]
        first = {completion.sample: completion async for completion in sampler.generate(requests)}
        again = {completion.sample: completion async for completion in sampler.generate(requests)}
        assert all(first[number].token_ids.tolist() == again[number].token_ids.tolist() for number in (0, 1))
        assert max(difference(sample, 0, None) for sample in first.values()) < 1e-4

        await more_than_fits_in_a_batch(sampler, prompt)

        for parameter in model.parameters():
            parameter.data.mul_(1.02)
        model.save_pretrained(directory / "weights")
        # With stop strings, tokens come as they are sampled.
        sampling = Sampling(temperature=0.7, max_tokens=120, stop=("~Q~",))
        arrived = when_tokens_arrive(engine, 2)
        stream = asyncio.create_task(collected(sampler.generate([GenerateRequest("long", prompt, sampling, 2, 5)])))
        await arrived.wait()
        assert await sampler.load_weights(WeightsHandle(1, "directory", str(directory / "weights"))) == 1
        for value in await stream:
            assert [version for _, version in value.versions] == [0, 1], (value.versions, len(value.token_ids))
            assert difference(value, value.versions[-1][0], None) < 1e-4, "the new weights, all of them"
        await engine.update_weight_version("7")
        with pytest.raises(WorkerError, match="sampled with the weights 7 where it should with 1"):
            await collected(sampler.generate(requests))
        await refused(sampler, directory)
        with pytest.raises(WorkerError, match="no safetensors file"):
            await collected(sampler.generate(requests))
    finally:
        sampler.close()


async def more_than_fits_in_a_batch(sampler: "VllmSampler", prompt: Sequence[int]) -> None:
    """Ask for more tokens of prompts than vLLM computes at a time: each gets the tokens that it gets alone."""
    prompts = [(number, *(list(prompt) * 8)[:199]) for number in range(5)]
    assert BATCH % 200 > 0, "the last prompt of a batch would be cut"
    rows = [
        GenerateRequest(str(prompt[0]), prompt, Sampling(temperature=0.7, max_tokens=2), 1, 5) for prompt in prompts
    ]
    alone = [(await collected(sampler.generate([request])))[0] for request in rows[-2:]]
    together = {completion.request_id: completion async for completion in sampler.generate(rows)}
    assert len(together) == len(rows)
    assert all(
        together[completion.request_id].token_ids.tolist() == completion.token_ids.tolist() for completion in alone
    )


def unknown_models_are_refused(config: RunConfig, directory: Path) -> None:
    """Ask for an engine with a model that vLLM does not know."""
    from rlcore_vllm.engine import open_engine, rollout_arguments

    with pytest.raises(WorkerError) as caught:
        open_engine(
            rollout_arguments(of_unknown_architecture(config, directory), config.plugins["vllm"], "cpu"),
            "rollout[0.0]",
            1,
        )
    assert "rollout[0.0]: vLLM cannot serve" in str(caught.value)
    assert "NoSuchForCausalLM" in str(caught.value)
    assert "\n" not in str(caught.value)


def of_unknown_architecture(config: RunConfig, directory: Path) -> RunConfig:
    """The configuration with a model that vLLM does not know."""
    path = directory / "unknown"
    path.mkdir()
    known = json.loads((Path(config.model.path) / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**known, "architectures": ["NoSuchForCausalLM"]}))
    return replace(config, model=replace(config.model, path=str(path)))


async def refused(sampler: "VllmSampler", directory: Path) -> None:
    """Hand over directories without the weights of the last norm, and without any."""
    from safetensors.torch import load_file, save_file

    fewer = load_file(directory / "weights" / "model.safetensors")
    del fewer["model.norm.weight"]
    (directory / "fewer").mkdir()
    save_file(fewer, directory / "fewer" / "model.safetensors")
    with pytest.raises(WorkerError, match=r"no weights for 1 parameters of vLLM's: model\.norm\.weight"):
        await sampler.load_weights(WeightsHandle(2, "directory", str(directory / "fewer")))
    with pytest.raises(WorkerError, match="no safetensors file"):
        await sampler.load_weights(WeightsHandle(2, "directory", str(directory / "nothing")))


def when_tokens_arrive(engine: Any, num_samples: int) -> asyncio.Event:
    """Set when tokens of so many samples have come from the engine, of those asked for from now on."""
    arrived, generate = asyncio.Event(), engine.generate
    begun: set[str] = set()

    async def generated(*arguments: Any, **more: Any) -> AsyncIterator[Any]:
        async for output in generate(*arguments, **more):
            begun.add(output.request_id)
            if len(begun) == num_samples:
                arrived.set()
            yield output

    engine.generate = generated
    return arrived


async def collected(completions: AsyncIterator[Completion]) -> list[Completion]:
    """All of them."""
    return [completion async for completion in completions]


if __name__ == "__main__":
    asyncio.run(sampled_with_other_weights(Path(sys.argv[1])))
