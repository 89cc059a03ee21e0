"""A directory whose tensors are not those of its model: named, and refused before training starts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlcore.config import ModelConfig
from rlcore.engines.hf.train.model import ModelKind, load_model, value_head_file
from rlcore.errors import ConfigError
from rlcore.testing.tiny import write_tiny_classifier, write_tiny_model

FILE = "model.safetensors"


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole model, with an output layer or with the embeddings as one."""
    path = tmp_path_factory.mktemp("models") / f"tied-{request.param}"
    return write_tiny_model(path, tie_word_embeddings=request.param)


def changed(model: Path, directory: Path, *, added: tuple[str, ...] = (), removed: tuple[str, ...] = ()) -> Path:
    """A copy of the model with these tensors more and less."""
    directory.mkdir()
    (directory / "config.json").write_bytes((model / "config.json").read_bytes())
    tensors = {name: tensor for name, tensor in load_file(model / FILE).items() if name not in removed}
    save_file({**tensors, **{name: torch.zeros(2) for name in added}}, directory / FILE, metadata={"format": "pt"})
    return directory


def load(path: Path, kind: ModelKind = ModelKind.CAUSAL_LM) -> Any:
    return load_model(kind, ModelConfig(path=str(path)), dtype="float32", device="cpu")


def assert_holds_the_files(loaded: Any, path: Path) -> None:
    """Every layer's weights and the embeddings are those of the files."""
    files = {name: tensor for name, tensor in load_file(path / FILE).items() if name.startswith("model.")}
    weights = loaded.transformer.state_dict()
    held = {f"model.{name.removeprefix('model.')}": weight for name, weight in weights.items()}
    assert files
    assert [name for name, tensor in files.items() if not torch.equal(held[name], tensor)] == []


@pytest.mark.parametrize("kind", [ModelKind.CAUSAL_LM, ModelKind.VALUE])
def test_whole_models_load(model: Path, kind: ModelKind) -> None:
    assert_holds_the_files(load(model, kind), model)


def test_tensors_that_the_model_does_not_have_are_named(model: Path, tmp_path: Path) -> None:
    foreign = ("model.layers.7.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.bias", "score.weight", "x")
    path = changed(model, tmp_path / "more", added=foreign)
    message = r"^model\.path='.*more': its files hold 4 tensors that a LlamaForCausalLM does not have: "
    with pytest.raises(ConfigError, match=message + r"model\.layers\.0\.mlp\.up_proj\.bias, .*, \.\.\.; needs files"):
        load(path)


@pytest.mark.parametrize("name", ["model.layers.7.mlp.up_proj.weight", "layers.0.foreign", "scores.weight"])
def test_a_value_models_files_are_checked_too(model: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="hold 1 tensors that a LlamaModel does not have"):
        load(changed(model, tmp_path / "more", added=(name,)), ModelKind.VALUE)


def test_a_lost_tensor_is_named(model: Path, tmp_path: Path) -> None:
    path = changed(model, tmp_path / "less", removed=("model.layers.1.mlp.up_proj.weight",))
    with pytest.raises(ConfigError, match=r"lack 1 of the weights of a LlamaForCausalLM, model\.layers\.1\.mlp\.up"):
        load(path)


def test_tied_weights_may_be_stored_twice_and_old_buffers_are_passed_over(tmp_path: Path) -> None:
    tied = write_tiny_model(tmp_path / "tied", tie_word_embeddings=True)
    tensors = load_file(tied / FILE)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tied / FILE, metadata={"format": "pt"})
    assert_holds_the_files(load(tied), tied)
    assert_holds_the_files(load(tied, ModelKind.VALUE), tied)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    save_file(tensors, tied / FILE, metadata={"format": "pt"})
    assert load(tied).transformer.model.rotary_emb.inv_freq.all()
    assert load(tied, ModelKind.VALUE).transformer.rotary_emb.inv_freq.all()


def test_a_policy_saved_with_a_critics_head_loads(model: Path, tmp_path: Path) -> None:
    path = changed(model, tmp_path / "critic")
    value_head_file(load(model, ModelKind.VALUE)).write(path)
    assert_holds_the_files(load(path), model)
    assert_holds_the_files(load(path, ModelKind.VALUE), model)


def test_a_classifier_is_a_value_models_start_and_no_policy(tmp_path: Path) -> None:
    path = write_tiny_classifier(tmp_path / "classifier")
    load(path, ModelKind.VALUE)
    with pytest.raises(ConfigError, match=r"lack 1 of the weights .*lm_head|does not have: score\.weight"):
        load(path)
