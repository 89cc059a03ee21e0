"""Weights that are not finite: no checkpoint of them is saved, and one of before is refused with a way on."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlcore.algo.loss import clip
from rlcore.config import AlgoConfig, EngineConfig, LoraConfig, ModelConfig
from rlcore.engines.hf import TrainEngine
from rlcore.engines.hf.train.policy_loss import PolicyLoss
from rlcore.errors import CheckpointError
from rlcore.testing import write_prompts
from rlcore.testing.tiny import write_tiny_model
from rlcore.train import train

# peft 0.21 reads an attribute that transformers 5.23 has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

KINDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "model": ("causal_lm", {}, "model/model.safetensors"),
    "adapter": ("causal_lm", {"lora": LoraConfig(enabled=True, rank=2)}, "adapter/adapter_model.safetensors"),
    "critic": ("value", {}, "model/model.safetensors"),
    "value head": ("value", {}, "model/value_head.safetensors"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "model")


def engine_of(path: Path, kind: str, settings: dict[str, Any]) -> TrainEngine:
    config = EngineConfig(**settings)
    return TrainEngine(kind, ModelConfig(path=str(path)), config, PolicyLoss(clip, AlgoConfig()))


def spoil(file: Path, number: float) -> str:
    """Give one weight of a file this number; returns its name."""
    tensors = load_file(file)
    name = sorted(tensors)[-1]
    tensors[name].view(-1)[-1] = number
    save_file(tensors, file, metadata={"format": "pt"})
    return name


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("part", KINDS)
def test_a_weight_that_is_not_finite_is_neither_saved_nor_copied_to_be_saved(
    model: Path, tmp_path: Path, part: str, number: float
) -> None:
    kind, settings, file = KINDS[part]
    engine = engine_of(model, kind, settings)
    trained = [(name, weight) for name, weight in engine.model.named_parameters() if weight.requires_grad]
    weights = [weight for name, weight in trained if ("value_head" in name) == (part == "value head")]
    with torch.no_grad():
        weights[-1].view(-1)[-1] = number
    words = rf"{file}: weight '.*' has numbers that are not finite; training has diverged, and this step is not saved"
    with pytest.raises(CheckpointError, match=words):
        engine.save(tmp_path / "saved")
    engine.snapshot()
    with pytest.raises(CheckpointError, match=words):
        engine.write_snapshot(tmp_path / "written")


@pytest.mark.parametrize("part", KINDS)
def test_a_checkpoint_that_is_not_finite_names_the_earlier_one_to_continue_from(
    model: Path, tmp_path: Path, part: str
) -> None:
    kind, settings, file = KINDS[part]
    inside = "critic" if kind == "value" else "."
    engine = engine_of(model, kind, settings)
    steps = {step: tmp_path / f"step_{step}" for step in (2, 10, 9, 11)}
    engine.save(steps[10] / inside)
    for step in (2, 9, 11):
        shutil.copytree(steps[10], steps[step])
    name = spoil(steps[10] / inside / file, float("nan"))
    with pytest.raises(CheckpointError, match=f"weight '{name}' has numbers that are not finite") as caught:
        engine.restore(steps[10] / inside)
    way_on = f"start a new run with --resume-from {steps[9]}, or remove '{steps[10]}' and continue with --resume"
    assert str(caught.value).endswith(f"; {way_on}")
    spoil(steps[2] / inside / file, float("inf"))
    with pytest.raises(CheckpointError, match=r"not finite; use another checkpoint$"):
        engine.restore(steps[2] / inside)


def test_a_buffer_may_hold_any_number(model: Path, tmp_path: Path) -> None:
    engine = engine_of(model, "causal_lm", {})
    engine.model.transformer.model.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    engine.save(tmp_path)
    assert "model.mask" in load_file(tmp_path / "model/model.safetensors")


@pytest.mark.slow
def test_a_run_that_diverges_ends_without_a_checkpoint_of_it_and_names_the_last_one(
    model: Path, tmp_path: Path
) -> None:
    (tmp_path / "rewards.py").write_text("async def length(trajectory):\n    return float(len(trajectory.text()))\n")
    config = {
        "model": {"path": str(model), "tokenizer": "bytes"},
        "data": {"sources": {"all": {"path": str(write_prompts(tmp_path / "prompts.jsonl", 8, "{index}"))}}},
        "rollout": {"samples_per_prompt": 4, "max_tokens": 8},
        "reward": {"functions": {"length": {"fn": f"{tmp_path / 'rewards.py'}:length"}}},
        "train": {"prompts_per_step": 2, "max_steps": 1, "dir": str(tmp_path / "runs"), "name": "run"},
        "cluster": {"device": "cpu"},
    }
    good = train(config).checkpoint
    with pytest.raises(CheckpointError, match="not finite") as caught:
        train(config, "train.max_steps=2", "actor.lr=1e39", resume=True)
    assert str(caught.value).endswith(f"; last checkpoint: {good}, continue with --resume")
    assert [path.name for path in sorted((tmp_path / "runs/run/checkpoints").iterdir())] == ["latest", "step_1"]
    assert train(config, "train.max_steps=2", "actor.lr=1e-6", resume=True).steps == 2
