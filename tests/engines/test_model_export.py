"""Exporting the model of a checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tqdm import tqdm

from rlcore.algo.loss import clip
from rlcore.config import AlgoConfig, EngineConfig, LoraConfig, ModelConfig
from rlcore.engines.hf import TrainEngine
from rlcore.engines.hf.train.model_export import export_model
from rlcore.engines.hf.train.policy_loss import PolicyLoss
from rlcore.errors import CheckpointError, ConfigError
from rlcore.testing.tiny import random_batch, write_tiny_model

torch.set_num_threads(1)  # the models are tiny, and the tests may share their cores

tqdm.monitor_interval = 0  # peft merges under a progress bar, whose watching thread would outlive the test
# peft 0.21 reads an attribute that transformers 5.23 has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

LORA = LoraConfig(enabled=True, rank=4, alpha=8.0)


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def llama(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "llama"
    return write_tiny_model(directory, num_key_value_heads=2, tie_word_embeddings=request.param)


def engine_of(path: Path, **settings: Any) -> TrainEngine:
    return TrainEngine("causal_lm", ModelConfig(str(path)), EngineConfig(**settings), PolicyLoss(clip, AlgoConfig()))


def logits_of(directory: Path, peft: bool = False) -> torch.Tensor:
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM

    opener: Any = AutoPeftModelForCausalLM if peft else AutoModelForCausalLM
    with torch.no_grad():
        logits: torch.Tensor = opener.from_pretrained(directory).eval()(input_ids=torch.tensor([[1, 2, 3, 4]])).logits
    return logits


@pytest.mark.slow
def test_a_lora_checkpoint_is_exported_as_adapter_and_merged(llama: Path, tmp_path: Path) -> None:
    engine = engine_of(llama, lora=LORA, warmup_steps=0, lr=1e-2)
    engine.update(random_batch())
    engine.save(tmp_path / "checkpoint")
    with torch.no_grad():
        expected = engine.model.transformer(torch.tensor([[1, 2, 3, 4]])).logits
    adapter = export_model(tmp_path / "checkpoint", tmp_path / "adapter", "adapter")
    torch.testing.assert_close(logits_of(adapter, peft=True), expected)
    assert (logits_of(llama) - expected).abs().max() > 1e-3
    for form in ("merged", "hf"):
        merged = export_model(tmp_path / "checkpoint", tmp_path / form, form)  # type: ignore[arg-type]
        assert not (merged / "adapter_config.json").exists()
        torch.testing.assert_close(logits_of(merged), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_an_adapter_names_its_base_by_an_absolute_path(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(llama.parent)
    engine_of(Path(llama.name), lora=LORA).save(tmp_path / "checkpoint")
    monkeypatch.chdir(tmp_path)
    write_tiny_model(tmp_path / llama.name, num_key_value_heads=2, seed=5)
    exported = export_model(tmp_path / "checkpoint", tmp_path / "out", "hf")
    torch.testing.assert_close(logits_of(exported), logits_of(llama))


@pytest.mark.slow
def test_an_adapter_is_merged_into_the_revision_of_its_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = tmp_path / "models--me--tiny"
    (cached / "refs").mkdir(parents=True)
    for seed, revision in enumerate(("main", "v1")):
        commit = str(seed) * 40
        write_tiny_model(cached / "snapshots" / commit, seed=seed)
        (cached / "refs" / revision).write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    engine = TrainEngine("causal_lm", ModelConfig("me/tiny", "v1"), EngineConfig(lora=LORA), None)
    engine.save(tmp_path / "checkpoint")
    exported = export_model(tmp_path / "checkpoint", tmp_path / "out", "hf")
    torch.testing.assert_close(logits_of(exported), logits_of(cached / "snapshots" / ("1" * 40)))


def test_a_full_checkpoint_is_exported_as_a_model_directory_only(llama: Path, tmp_path: Path) -> None:
    engine_of(llama).save(tmp_path / "checkpoint")
    exported = export_model(tmp_path / "checkpoint", tmp_path / "out", "hf")
    torch.testing.assert_close(logits_of(exported), logits_of(llama))
    with pytest.raises(ConfigError, match="form 'adapter' needs a LoRA checkpoint"):
        export_model(tmp_path / "checkpoint", tmp_path / "other", "adapter")
    with pytest.raises(ConfigError, match="is not empty"):
        export_model(tmp_path / "checkpoint", tmp_path / "out", "hf")
    with pytest.raises(CheckpointError, match="holds neither 'model/' nor 'adapter/'"):
        export_model(tmp_path / "nothing", tmp_path / "other", "hf")


@pytest.mark.parametrize("out", ["file", "file/below", "link"])
def test_an_export_to_a_place_that_cannot_be_written_is_one_line(tmp_path: Path, out: str) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(ConfigError, match=r"^export: '.*' cannot be written; choose a new directory: \w+Error.*$"):
        export_model(tmp_path, tmp_path / out, "hf")
