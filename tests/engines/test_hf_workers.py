"""The workers of the transformers backend in whole runs: planned, launched and trained as a user's are."""

import asyncio
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tqdm import tqdm

from rlcore.contracts.actor import ActorWorker
from rlcore.contracts.reference import ReferenceWorker
from rlcore.engines.hf.train.model_export import export_model
from rlcore.plugins.planning import plan_run
from rlcore.report import metrics
from rlcore.runtime.launch import launch
from rlcore.testing import write_prompts
from rlcore.testing.runs import differing
from rlcore.testing.tiny import random_batch, write_tiny_model
from rlcore.train import train
from rlcore.types import Completion, GenerateRequest, Lane, Sampling

tqdm.monitor_interval = 0  # peft merges under a progress bar, whose watching thread would outlive the test
# peft 0.21 reads an attribute that transformers 5.23 has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

LORA = ("actor.lora.enabled=true", "actor.lora.rank=4")
KL = ("algo.kl.placement=loss", "algo.kl.coef=0.05")


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "rewards.py").write_text(
        "def low(completions, **columns):\n    return [sum(c < 'a' for c in text) / 8 for text in completions]\n"
    )
    return {
        "model": {"path": str(write_tiny_model(tmp_path / "tiny", num_key_value_heads=2)), "tokenizer": "bytes"},
        "data": {"sources": {"train": {"path": str(write_prompts(tmp_path / "prompts.jsonl", 20))}}},
        "rollout": {"samples_per_prompt": 4, "max_tokens": 8},
        "reward": {"functions": {"low": {"fn": f"{tmp_path / 'rewards.py'}:low", "children": 1}}},
        "actor": {"lr": 0.002, "micro_batch_tokens": 400},
        "cluster": {"threads": 1},
        "train": {"prompts_per_step": 4, "max_steps": 4, "dir": str(tmp_path / "runs"), "name": "run"},
        "checkpoint": {"every_steps": 2},
    }


@pytest.mark.real
@pytest.mark.parametrize("variant", [(), KL, (*LORA, *KL)], ids=["plain", "kl", "lora_kl"])
def test_two_steps_and_a_resume_equal_four_steps_bit_for_bit(config: dict[str, Any], variant: tuple[str, ...]) -> None:
    settings = ("actor.minibatch_prompts=2", "actor.warmup_steps=6", *variant)
    whole = train(config, *settings).run_dir
    train(config, *settings, "train.name=halved", "train.max_steps=2")
    result = train(config, *settings, "train.name=halved", resume=True)
    assert differing(whole, result.run_dir) == []
    rows = [row for row in metrics.read(whole) if "reward/mean" in row]
    assert [row["actor/skipped"] for row in rows] == [0.0] * 4
    assert ("policy/kl" in rows[0]) == bool(variant)
    if variant:
        assert 0.0 <= rows[0]["policy/kl"] < rows[-1]["policy/kl"]
    assert rows[-1]["actor/lr"] == pytest.approx(0.002)
    assert rows[0]["actor/lr"] < 0.002


@pytest.mark.slow
def test_the_reward_rises(config: dict[str, Any]) -> None:
    result = train(config, "train.max_steps=12", "checkpoint.every_steps=0", "actor.lr=0.01")
    means = [row["reward/mean"] for row in metrics.read(result.run_dir) if "reward/mean" in row]
    assert sum(means[-3:]) / 3 > sum(means[:3]) / 3 + 0.1


@pytest.mark.slow
def test_the_checkpoint_of_a_lora_run_is_exported_as_a_model(config: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    result = train(config, *LORA, "train.max_steps=1")
    assert result.checkpoint is not None
    merged = export_model(result.checkpoint, tmp_path / "merged", "merged")
    weights, start = (
        dict(AutoModelForCausalLM.from_pretrained(path).named_parameters())
        for path in (merged, config["model"]["path"])
    )
    assert weights.keys() == start.keys()
    assert any(not torch.equal(weights[name], start[name]) for name in start)


@pytest.mark.slow
def test_logprobs_of_actor_and_reference_agree_before_the_first_update_and_differ_after(
    config: dict[str, Any], tmp_path: Path
) -> None:
    async def story() -> None:
        async with launch(plan_run([config], KL), tmp_path / "run") as run:
            assert run.reference is not None
            actor, reference = run.actor.replicas[0], run.reference.replicas[0]
            batch = random_batch()
            before = await actor.call(ActorWorker.logprobs, batch)
            frozen = await reference.call(ReferenceWorker.logprobs, batch)
            np.testing.assert_array_equal(frozen, before)
            await actor.call(ActorWorker.update, replace(batch, reference_logprobs_BT=frozen))
            after = await actor.call(ActorWorker.logprobs, batch)
            assert (after != before).any()
            again = await reference.call(ReferenceWorker.logprobs, batch)
            np.testing.assert_array_equal(again, before)

    asyncio.run(story())


@pytest.mark.slow
def test_completions_carry_the_published_version(config: dict[str, Any], tmp_path: Path) -> None:
    async def story() -> list[int]:
        async with launch(plan_run([config], []), tmp_path / "run") as run:
            await run.publish(5)
            request = GenerateRequest("r", (65, 66), Sampling(max_tokens=4), 2, 0)
            return [completion.version async for completion in run.generator.generate([request], Lane.TRAIN)]

    assert asyncio.run(story()) == [5, 5]


@pytest.mark.slow
def test_rows_that_outlive_an_update_continue_with_the_new_weights(config: dict[str, Any], tmp_path: Path) -> None:
    async def story() -> dict[str, Completion]:
        async with launch(plan_run([config], []), tmp_path / "run") as run:
            requests = [
                GenerateRequest(name, (65, 66), Sampling(max_tokens=tokens), 1, 0)
                for name, tokens in (("a", 1), ("b", 200))
            ]
            found = {}
            async for completion in run.generator.generate(requests, Lane.TRAIN):
                found[completion.request_id] = completion
                if completion.request_id == "a":
                    await run.actor.replicas[0].call(ActorWorker.update, random_batch())
                    await run.publish(1)
            return found

    found = asyncio.run(story())
    assert found["a"].versions == ((0, 0),)
    # Version 0 a second time: what the changed weights sampled before they were published.
    assert [version for _, version in found["b"].versions] in ([0, 1], [0, 0, 1])
    starts = [start for start, _ in found["b"].versions]
    assert starts == sorted({*starts, 0})
    assert starts[-1] < len(found["b"].token_ids)
    assert found["b"].version == 0


@pytest.mark.slow
def test_the_backend_is_planned_without_torch(config: dict[str, Any]) -> None:
    script = f"""
import sys
from rlcore.plugins.planning import plan_run
plan = plan_run([{config!r}], [])
assert {{worker.cls.__name__ for worker in plan.workers}} == {{"HfActor", "HfRollout"}}
sys.exit(any(name in sys.modules for name in ("torch", "transformers", "accelerate")))
"""
    assert subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[2], check=False).returncode == 0
