"""Quantised and incomplete checkpoints are refused in the plan, without torch, in the words of the engine."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlcore.config import ModelConfig
from rlcore.contracts.actor import ACTOR
from rlcore.contracts.stored_formats import check_stored
from rlcore.data.tokenizer import load_tokens
from rlcore.errors import ConfigError
from rlcore.plan import RunPlan
from rlcore.plugins.planning import plan_run
from rlcore.testing.null import SETTINGS

LLAMA = {
    "model_type": "llama",
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 10,
    "intermediate_size": 16,
}
HF = ("actor.backend=hf", "rollout.backend=hf", "actor.shared_prefix=none")
KL = ("algo.kl.placement=loss",)
CRITIC = ("critic.engine=critic_engine", "algo.preset=ppo")


def write_model(directory: Path, dtype: str = "F32", **settings: Any) -> Path:
    """config.json, and the header of a file of weights."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({**LLAMA, **settings}))
    entry = {"dtype": dtype, "shape": [2, 2], "data_offsets": [0, 0]}
    header = json.dumps({"__metadata__": {"format": "pt"}, "model.up_proj.weight": entry}).encode()
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return directory


def planned(model: Path | str, *overrides: str) -> RunPlan:
    return plan_run([], [*SETTINGS, *HF, f"model.path={model}", *overrides], ["null"])


def trained_by(plan: RunPlan) -> str:
    """The backend of the plan's actor."""
    return next(worker.request.backend for worker in plan.workers if worker.request.role == ACTOR)


QUANTISED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"quantization_config": {"quant_method": "fp8"}}, "its weights are quantised (quant_method=fp8)"),
    ({"quantization_config": {"quant_method": "gptq"}}, "its weights are quantised (quant_method=gptq)"),
    ({"dtype": "F8_E4M3"}, "tensor 'model.up_proj.weight' is stored as F8_E4M3"),
    ({"dtype": "I8"}, "tensor 'model.up_proj.weight' is stored as I8"),
)


@pytest.mark.parametrize(("settings", "found"), QUANTISED, ids=["fp8", "gptq", "float8", "int8"])
def test_a_quantised_model_is_refused_in_one_line_that_the_engine_would_say(
    tmp_path: Path, settings: dict[str, Any], found: str
) -> None:
    path = write_model(tmp_path / "model", **settings)
    with pytest.raises(ConfigError) as caught:
        planned(path)
    text = str(caught.value)
    assert text == (
        f"model.path='{path}': {found}, which training cannot start from; needs float32, bfloat16 or float16: choose "
        "the checkpoint that this one was quantised from"
    )
    with pytest.raises(ConfigError) as loaded:
        check_stored("model.path", str(path))
    assert str(loaded.value) == text


@pytest.mark.parametrize("dtype", ["F64", "F32", "BF16", "F16"])
def test_other_models_are_planned(tmp_path: Path, dtype: str) -> None:
    assert trained_by(planned(write_model(tmp_path / "model", dtype, quantization_config=None))) == "hf"
    assert trained_by(planned("none")) == "hf"


def test_a_quantised_reference_and_a_quantised_critic_are_refused_by_their_setting(tmp_path: Path) -> None:
    whole = write_model(tmp_path / "whole")
    narrow = write_model(tmp_path / "narrow", quantization_config={"quant_method": "fp8"})
    with pytest.raises(ConfigError, match=rf"^reference\.path='{narrow}': its weights are quantised"):
        planned(whole, *KL, f"reference.path={narrow}")
    with pytest.raises(ConfigError, match=rf"^plugins\.critic_engine\.path='{narrow}': its weights are quantised"):
        planned(whole, *CRITIC, f"plugins.critic_engine.path={narrow}")
    planned(whole, *KL, f"reference.path={whole}")


def test_a_file_that_the_index_names_and_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(tmp_path / "model")
    names = [f"model-{number:05d}-of-00003.safetensors" for number in range(1, 4)]
    (path / "model.safetensors").rename(path / names[0])
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {name: name for name in names}}))
    with pytest.raises(ConfigError) as caught:
        planned(path)
    assert str(caught.value) == (
        f"model.path='{path}': found no '{names[1]}' and 1 more, which model.safetensors.index.json names; needs every "
        "file of the model: copy or download it again"
    )
    with pytest.raises(ConfigError) as loaded:
        check_stored("model.path", str(path))
    assert str(loaded.value) == str(caught.value)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    snapshots = tmp_path / "hub" / "models--someone--llama" / "snapshots"
    snapshots.mkdir(parents=True)
    path.rename(snapshots / "main")
    planned("someone/llama")  # the Hub has the others
    (snapshots / "main").rename(path)
    for name in names[1:]:
        (path / name).symlink_to(path / names[0])
    planned(path)


def test_another_backend_may_train_what_the_core_cannot(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model", quantization_config={"quant_method": "fp8"})
    assert trained_by(planned(path, "actor.backend=null", "rollout.backend=null")) == "null"


def test_the_model_of_the_hubs_cache_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    snapshots = tmp_path / "hub" / "models--someone--llama" / "snapshots"
    snapshots.mkdir(parents=True)
    write_model(snapshots / "main", quantization_config={"quant_method": "fp8"})
    with pytest.raises(ConfigError, match=r"^model\.path='someone/llama': its weights are quantised"):
        planned("someone/llama")


def cut(path: Path) -> None:
    """Weights of 16 bytes, of which the last one is missing."""
    entry = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
    header = json.dumps({"model.up_proj.weight": entry}).encode()
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"x" * 15)


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "no object": (lambda path: (path / "config.json").write_text("[]"), "its config.json holds list, not an object; "),
    "no end": (lambda path: (path / "config.json").write_text("{"), "its config.json is not JSON (JSONDecodeError: "),
    "no text": (lambda path: (path / "config.json").write_bytes(b"\xff\xfe"), "its config.json is not JSON (Unicode"),
    "deep": (
        lambda path: (path / "config.json").write_text("[" * 100_000),
        "its config.json is not JSON (ValueError: ",
    ),
    "no header": (lambda path: (path / "model.safetensors").write_bytes(b"x"), "'model.safetensors' has 1 bytes, and "),
    "cut": (cut, "'model.safetensors' has 107 bytes, and its header says 108; needs the whole file: copy or "),
}


@pytest.mark.parametrize("case", REFUSED)
def test_damaged_files_are_refused_in_one_line_that_the_engine_would_say(tmp_path: Path, case: str) -> None:
    damage, found = REFUSED[case]
    path = write_model(tmp_path / "model")
    damage(path)
    with pytest.raises(ConfigError) as caught:
        planned(path)
    assert str(caught.value).startswith(f"model.path='{path}': {found}")
    assert str(caught.value).endswith(": copy or download it again")
    with pytest.raises(ConfigError) as loaded:
        check_stored("model.path", str(path))
    assert str(loaded.value) == str(caught.value)


@pytest.mark.parametrize("case", ["no object", "no end", "no text", "deep"])
def test_tokens_are_not_loaded_next_to_a_damaged_configuration(tmp_path: Path, case: str) -> None:
    damage, found = REFUSED[case]
    path = write_model(tmp_path / "model")
    damage(path)
    with pytest.raises(ConfigError) as caught:
        load_tokens(ModelConfig(path=str(path)), "")
    assert str(caught.value).startswith(f"model.path='{path}': {found}")


def test_whole_weights_are_planned(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model")
    cut(path)
    with (path / "model.safetensors").open("ab") as file:
        file.write(b"x")
    assert trained_by(planned(path)) == "hf"


DAMAGED: dict[str, Callable[[Path], object]] = {
    "a pipe": lambda path: ((path / "config.json").unlink(), os.mkfifo(path / "config.json")),
    "no weights": lambda path: (path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"xx"),
    "no offsets": lambda path: (path / "model.safetensors").write_bytes((8).to_bytes(8, "little") + b'{"a": 1}'),
}


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED)
@pytest.mark.timeout(60)
def test_files_that_are_damaged_in_other_ways_end_no_plan(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    path = write_model(tmp_path / "model")
    damage(path)
    assert trained_by(planned(path)) == "hf"
