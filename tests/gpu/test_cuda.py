"""Tests that need a CUDA device: the same runs on it, and what they agree with on the CPU."""

from pathlib import Path
from typing import Any

import pytest
import rlcore_view
import torch

from rlcore.report import metrics
from rlcore.testing import write_prompts
from rlcore.testing.tiny import write_tiny_model
from rlcore.train import TrainResult, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]
REWARD = """
async def vowels(trajectory):
    return sum(letter in "aeiou" for letter in trajectory.text()) / 12
"""


def config(directory: Path, name: str) -> dict[str, Any]:
    (directory / "rewards.py").write_text(REWARD)
    return {
        "model": {"path": str(write_tiny_model(directory / "tiny")), "tokenizer": "bytes"},
        "data": {"sources": {"train": {"path": str(write_prompts(directory / "prompts.jsonl", 20, "{index}"))}}},
        "eval": {"sources": {"heldout": {"path": str(write_prompts(directory / "heldout.jsonl", 4, "held {index}"))}}},
        "rollout": {"backend": "hf", "samples_per_prompt": 4, "max_tokens": 12},  # chosen, vLLM takes no such heads
        "reward": {"functions": {"vowels": {"fn": f"{directory / 'rewards.py'}:vowels"}}},
        "actor": {"lr": 0.003},
        "train": {"prompts_per_step": 4, "max_steps": 3, "dir": str(directory / "runs"), "name": name},
    }


def steps(result: TrainResult) -> list[dict[str, float]]:
    return [row for row in metrics.read(result.run_dir) if "reward/mean" in row]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointing", ["true", "false"])
def test_a_run_on_the_device_trains_and_its_checkpoint_opens(tmp_path: Path, dtype: str, checkpointing: str) -> None:
    from transformers import AutoModelForCausalLM

    result = train(
        config(tmp_path, "gpu"),
        "cluster.device=cuda",
        f"actor.dtype={dtype}",
        f"actor.gradient_checkpointing={checkpointing}",
    )
    rows = steps(result)
    assert len(rows) == 3
    assert all(row["actor/skipped"] == 0.0 and row["actor/grad_norm"] > 0 for row in rows)
    assert result.checkpoint is not None
    assert AutoModelForCausalLM.from_pretrained(result.checkpoint / "model").num_parameters() > 0


def test_greedy_evaluation_on_the_device_equals_the_cpus(tmp_path: Path) -> None:
    texts = {}
    exact = ("actor.dtype=float32", "actor.tf32=false", "eval.temperature=0", "train.max_steps=1")
    for device in ("cpu", "cuda"):
        result = train(config(tmp_path, device), f"cluster.device={device}", *exact)
        samples = [sample for sample in rlcore_view.read(result.run_dir).samples if sample.lane == "eval"]
        texts[device] = [(sample.step, sample.prompt_id, sample.text()) for sample in samples if sample.step == 0]
    assert len({text for _, _, text in texts["cpu"]}) > 1
    assert texts["cuda"] == texts["cpu"]


def test_ratios_start_at_one_on_the_device(tmp_path: Path) -> None:
    result = train(config(tmp_path, "ratio"), "cluster.device=cuda", "actor.minibatch_prompts=4", "actor.epochs=2")
    first = steps(result)[0]
    assert first["policy/ratio_mean"] == pytest.approx(1.0, abs=0.2)


def test_offloaded_optimizer_state_changes_no_result(tmp_path: Path) -> None:
    runs = [
        steps(train(config(tmp_path, name), "cluster.device=cuda", f"actor.offload={offload}"))
        for name, offload in (("kept", "false"), ("offloaded", "true"))
    ]
    assert [row["policy/loss"] for row in runs[0]] == pytest.approx([row["policy/loss"] for row in runs[1]], rel=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_offloaded_run_resumes_on_the_device(tmp_path: Path, dtype: str) -> None:
    changes = ("cluster.device=cuda", f"actor.dtype={dtype}", "actor.offload=true", "checkpoint.every_steps=1")
    train(config(tmp_path, "offloaded"), *changes, "train.max_steps=2")
    resumed = train(config(tmp_path, "offloaded"), *changes, resume=True)
    assert [row["actor/skipped"] for row in steps(resumed)] == [0.0, 0.0, 0.0]
