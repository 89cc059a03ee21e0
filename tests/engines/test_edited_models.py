"""Files of a model edited by hand, also in a checkpoint whose sums agree: one line that names the tensor."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlcore.config import ModelConfig
from rlcore.engines.hf.train.model import ModelKind, load_model
from rlcore.engines.hf.train.state import load_weights
from rlcore.errors import CheckpointError, ConfigError
from rlcore.testing.tiny import write_tiny_model

FILE, WEIGHT = "model.safetensors", "model.layers.0.mlp.up_proj.weight"
Tensors = dict[str, torch.Tensor]
Edit = Callable[[Path], object]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "model")


def weight(change: Callable[[torch.Tensor], torch.Tensor]) -> Edit:
    """Replaces a weight."""

    def edit(directory: Path) -> None:
        tensors = load_file(directory / FILE)
        tensors[WEIGHT] = change(tensors[WEIGHT]).contiguous()
        save_file(tensors, directory / FILE, metadata={"format": "pt"})

    return edit


def renamed(directory: Path) -> None:
    tensors = load_file(directory / FILE)
    tensors["model.layers.0.mlp.up_proj.wieght"] = tensors.pop(WEIGHT)
    save_file(tensors, directory / FILE, metadata={"format": "pt"})


def stored_as(dtype: torch.dtype) -> Edit:
    return weight(lambda tensor: tensor.to(dtype))


def with_number(number: float) -> Edit:
    return weight(lambda tensor: tensor.index_fill(0, torch.tensor([0]), number))


def header(text: bytes) -> Edit:
    """A file that is a header alone."""
    return lambda directory: (directory / FILE).write_bytes(len(text).to_bytes(8, "little") + text)


def truncated(num_bytes: int) -> Edit:
    return lambda directory: (directory / FILE).write_bytes((directory / FILE).read_bytes()[:num_bytes])


def in_place(make: Callable[[Path], object]) -> Edit:
    def edit(directory: Path) -> None:
        (directory / FILE).unlink()
        make(directory / FILE)

    return edit


def described(text: str | bytes) -> Edit:
    """Another config.json."""
    data = text.encode() if isinstance(text, str) else text
    return lambda directory: (directory / "config.json").write_bytes(data)


def with_settings(**values: Any) -> Edit:
    """Other values in config.json."""

    def edit(directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps({**config, **values}))

    return edit


EDITS: dict[str, tuple[Edit, str]] = {
    "renamed": (renamed, f"lack 1 of the weights of a LlamaForCausalLM, {WEIGHT} among them"),
    "transposed": (weight(lambda tensor: tensor.T), rf"hold '{WEIGHT}' with the shape \[32, 48\], .* has \[48, 32\]"),
    "a row less": (weight(lambda tensor: tensor[1:]), r"with the shape \[47, 32\]"),
    "flat": (weight(lambda tensor: tensor.flatten()), r"with the shape \[1536\]"),
    "bytes": (stored_as(torch.int8), f"'{WEIGHT}' is stored as I8"),
    "integers": (stored_as(torch.int64), "is stored as I64"),
    "flags": (stored_as(torch.bool), "is stored as BOOL"),
    "complex": (stored_as(torch.complex64), "is stored as C64"),
    "eighths": (stored_as(torch.float8_e4m3fn), "is stored as F8_E4M3"),
    "cut at 100": (truncated(100), r"has 100 bytes, and its header says \d+; needs the whole file"),
    "cut in its length": (truncated(4), r"has 4 bytes, and its header says \d+; needs the whole file"),
    "empty": (truncated(0), "SafetensorError"),
    "a deep header": (header(b"[" * 100_000), "SafetensorError"),
    "a header that is a list": (header(b"[]"), "SafetensorError"),
    "an entry that is a text": (header(json.dumps({WEIGHT: "x"}).encode()), "SafetensorError"),
    "a directory": (in_place(Path.mkdir), "no file named"),
    "a link to nothing": (in_place(lambda path: path.symlink_to("/nope")), "no file named"),
    "a configuration without an end": (described("{"), "JSONDecodeError"),
    "a configuration of bytes": (described(b"\xff\xfe"), "UnicodeDecodeError"),
    "a deep configuration": (described("[" * 100_000), "nested too deep|RecursionError"),
    "a configuration that is a list": (described("[]"), "holds list, not an object|AttributeError"),
    "another kind": (with_settings(model_type="nope"), "nope"),
    "wider": (with_settings(hidden_size=64), r"shape|size"),
    "more layers": (with_settings(num_hidden_layers=3), r"lack 9 of the weights"),
    "no heads": (with_settings(num_attention_heads=0), "ZeroDivisionError"),
}
NUMBERS = {"not a number": float("nan"), "infinite": float("inf")}


def edited(model: Path, directory: Path, edit: Edit) -> Path:
    """A copy of the model below `directory`, as in a checkpoint, after the edit."""
    copy = directory / "model"
    copy.mkdir()
    for name in (FILE, "config.json"):
        (copy / name).write_bytes((model / name).read_bytes())
    edit(copy)
    return copy


def opened(path: Path, kind: ModelKind = ModelKind.CAUSAL_LM) -> Any:
    return load_model(kind, ModelConfig(path=str(path)), dtype="float32", device="cpu")


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_model_is_not_trained_and_the_line_says_why(model: Path, tmp_path: Path, name: str) -> None:
    edit, words = EDITS[name]
    path = edited(model, tmp_path, edit)
    with pytest.raises(ConfigError, match=words) as caught:
        opened(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_model_in_a_checkpoint_is_not_restored(model: Path, tmp_path: Path, name: str) -> None:
    edit, words = EDITS[name]
    edited(model, tmp_path, edit)
    with pytest.raises(CheckpointError, match=words) as caught:
        load_weights(opened(model), tmp_path, "actor")
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", NUMBERS)
def test_weights_that_are_not_finite_are_neither_trained_nor_restored(model: Path, tmp_path: Path, name: str) -> None:
    path = edited(model, tmp_path, with_number(NUMBERS[name]))
    with pytest.raises(ConfigError, match="nan"):
        opened(path)
    with pytest.raises(CheckpointError, match=f"weight '{WEIGHT}' has numbers that are not finite"):
        load_weights(opened(model), tmp_path, "actor")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", [ModelKind.CAUSAL_LM, ModelKind.VALUE])
def test_weights_of_other_wide_formats_are_taken(
    model: Path, tmp_path: Path, dtype: torch.dtype, kind: ModelKind
) -> None:
    path = edited(model, tmp_path, stored_as(dtype))
    found = dict(opened(path, kind).transformer.named_parameters())
    name = WEIGHT.removeprefix("model.") if kind is ModelKind.VALUE else WEIGHT
    assert torch.equal(found[name], load_file(model / FILE)[WEIGHT].to(dtype).float())
    if kind is ModelKind.CAUSAL_LM:
        load_weights(opened(model), tmp_path, "actor")
