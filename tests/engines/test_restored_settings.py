"""Settings of an engine that a restore keeps, and those that it refuses."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlcore.algo.loss import clip
from rlcore.config import AlgoConfig, EngineConfig, LoraConfig, ModelConfig
from rlcore.engines.hf import TrainEngine
from rlcore.engines.hf.train.model import value_head_file
from rlcore.engines.hf.train.policy_loss import PolicyLoss
from rlcore.errors import CheckpointError
from rlcore.testing.tiny import random_batch, write_tiny_model

torch.set_num_threads(1)  # the models are tiny, and the tests may share their cores

# peft 0.21 reads an attribute that transformers 5.23 has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

LORA = LoraConfig(enabled=True, rank=4, alpha=8.0)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "llama", num_key_value_heads=2)


def engine_of(path: Path, seed: int = 0, **settings: Any) -> TrainEngine:
    config = EngineConfig(lr=1e-3, **settings)
    return TrainEngine("causal_lm", ModelConfig(path=str(path)), config, PolicyLoss(clip, AlgoConfig()), seed=seed)


def weights_of(engine: TrainEngine) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in engine.model.named_parameters()}


@pytest.mark.parametrize("settings", [{"weight_decay": 0.5}, {"beta1": 0.5}, {"beta2": 0.9}], ids=str)
def test_betas_and_weight_decay_after_a_resume_are_those_of_its_settings(
    llama: Path, tmp_path: Path, settings: dict[str, float]
) -> None:
    engine, same, other = engine_of(llama), engine_of(llama), engine_of(llama, **settings)
    engine.update(random_batch(seed=0))
    engine.save(tmp_path)
    for resumed in (same, other):
        resumed.restore(tmp_path)
        resumed.update(random_batch(seed=1))
    weights = weights_of(same)
    moved = {name for name, tensor in weights_of(other).items() if not torch.equal(tensor, weights[name])}
    decayed = {name for name, tensor in weights.items() if tensor.ndim > 1}
    assert moved == (decayed if "weight_decay" in settings else weights.keys()), "weight decay spares vectors"


def test_an_adapter_that_was_trained_with_another_alpha_is_refused(llama: Path, tmp_path: Path) -> None:
    engine_of(llama, lora=LORA).save(tmp_path)
    engine = engine_of(llama, lora=replace(LORA, alpha=64.0), seed=1)
    before = weights_of(engine)
    message = r"trained with lora\.alpha=8, and this run's is 64; needs actor\.lora\.alpha=8, or a new run"
    with pytest.raises(CheckpointError, match=message) as caught:
        engine.restore(tmp_path)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(engine).items())


def test_a_checkpoint_of_the_other_kind_names_the_setting_with_which_it_was_saved(llama: Path, tmp_path: Path) -> None:
    kinds = {"a whole model": LoraConfig(), "a LoRA adapter": LORA}
    for (saved, lora), (needed, other) in (tuple(kinds.items()), tuple(reversed(kinds.items()))):
        directory = tmp_path / saved
        engine_of(llama, lora=lora).save(directory)
        enabled = str(lora.enabled).lower()
        with pytest.raises(CheckpointError) as caught:
            engine_of(llama, lora=other).restore(directory)
        assert str(caught.value) == (
            f"checkpoint '{directory}': it holds {saved}, and this run trains {needed}; needs "
            f"actor.lora.enabled={enabled}, as it was when it was saved, or a new run that starts from the exported "
            "model"
        )


def test_a_value_head_with_several_settings_is_always_written_in_the_same_bytes(tmp_path: Path) -> None:
    model: Any = SimpleNamespace(
        transformer=SimpleNamespace(config=SimpleNamespace(model_type="llama")),
        head_tensors=lambda: {"weight": torch.ones(2)},
        head_settings=lambda: {"alpha": "8", "rank": "2"},
    )
    for number in range(12):
        value_head_file(model).write(tmp_path / str(number))
    assert len({path.read_bytes() for path in tmp_path.glob("*/*.safetensors")}) == 1
