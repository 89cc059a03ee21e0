"""Checkpoints in formats that training can and cannot start from."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlcore.algo.loss import clip
from rlcore.config import AlgoConfig, EngineConfig, ModelConfig
from rlcore.engines.hf import TrainEngine
from rlcore.engines.hf.train.policy_loss import PolicyLoss
from rlcore.errors import ConfigError
from rlcore.testing.tiny import random_batch, write_tiny_model

torch.set_num_threads(1)  # the models are tiny, and the tests may share their cores


def engine_of(path: Path, **settings: Any) -> TrainEngine:
    config = EngineConfig(**{"dtype": "bfloat16", **settings})
    return TrainEngine("causal_lm", ModelConfig(path=str(path)), config, PolicyLoss(clip, AlgoConfig()))


def stored_as(path: Path, dtype: torch.dtype, name: str = "") -> Path:
    """The model with every tensor, or the one of that name, in another format."""
    file = path / "model.safetensors"
    tensors = {key: value.to(dtype) if name in ("", key) else value for key, value in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_checkpoint_in_float16_trains_in_every_format_and_masters_hold_its_numbers(
    tmp_path: Path, dtype: str
) -> None:
    path = stored_as(write_tiny_model(tmp_path), torch.float16)
    stored = load_file(path / "model.safetensors")
    engine = engine_of(path, dtype=dtype)
    for name, master in engine._optimizer.half_masters().items():
        assert torch.equal(master, stored[name.removeprefix("transformer.")].float())
    assert engine.update(random_batch())["actor/skipped"] == 0.0


@pytest.mark.parametrize("kind", ["causal_lm", "value"])
@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.float8_e4m3fn, "F8_E4M3"), (torch.float8_e5m2, "F8_E5M2")], ids=["e4m3", "e5m2"]
)
def test_a_checkpoint_in_float8_is_refused_in_one_line(
    tmp_path: Path, dtype: torch.dtype, name: str, kind: str
) -> None:
    path = stored_as(write_tiny_model(tmp_path), dtype, "model.layers.1.mlp.up_proj.weight")
    with pytest.raises(ConfigError) as caught:
        TrainEngine(kind, ModelConfig(path=str(path)), EngineConfig(), None)
    assert str(caught.value) == (
        f"model.path='{path}': tensor 'model.layers.1.mlp.up_proj.weight' is stored as {name}, which training cannot "
        "start from; needs float32, bfloat16 or float16: choose the checkpoint that this one was quantised from"
    )


def test_a_quantised_checkpoint_is_refused_in_one_line(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(
        ConfigError, match=r"model\.path='.*': its weights are quantised \(quant_method=fp8\)"
    ) as caught:
        engine_of(path)
    assert "\n" not in str(caught.value)


def test_weights_that_float16_does_not_hold_are_refused_in_one_line(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path)
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"][3, 4] = 1e5
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError) as caught:
        engine_of(path, dtype="float16")
    assert str(caught.value) == (
        f"model.path='{path}': weight 'lm_head.weight' has numbers that float16 does not hold (65504 at most); choose "
        "actor.dtype=bfloat16 or float32"
    )
    assert engine_of(path).model.transformer.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["causal_lm", "value"])
def test_activations_that_overflow_in_float16_are_refused_in_one_line(tmp_path: Path, kind: str) -> None:
    """Every weight is below 65504; what the layers make of them is not."""
    path = write_tiny_model(tmp_path)
    tensors = load_file(path / "model.safetensors")
    louder = {name: value * 3000 if "_proj" in name and "mlp" in name else value for name, value in tensors.items()}
    assert max(float(value.abs().max()) for value in louder.values()) < 65504
    save_file(louder, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError) as caught:
        TrainEngine(kind, ModelConfig(path=str(path)), EngineConfig(dtype="float16"), None)
    assert str(caught.value) == (
        f"model.path='{path}': its activations overflow in float16 (65504 at most); choose actor.dtype=bfloat16 or "
        "float32"
    )
    TrainEngine(kind, ModelConfig(path=str(path)), EngineConfig(dtype="bfloat16"), None)


def test_an_index_that_names_weights_of_another_directory_is_refused_by_the_engine(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "model")
    names = list(load_file(path / "model.safetensors"))
    (path / "model.safetensors").rename(tmp_path / "w.safetensors")
    (path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, "../w.safetensors")})
    )
    with pytest.raises(ConfigError) as caught:
        engine_of(path, dtype="float32")
    assert str(caught.value).startswith(f"model.path='{path}': 'model.safetensors.index.json': ValueError: it names")
