"""Files of a model with anything in them: a plan knows less, and does not end, wait or read what fits no memory."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlcore.contracts.model_files import (
    ODD,
    check_model_files,
    model_shape,
    num_parameters,
    saved_tensors,
    usual_answers,
)
from rlcore.errors import ConfigError

GOOD: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "vocab_size": 256,
}
VALUES: tuple[Any, ...] = (None, -1, 0, 10**400, float("inf"), float("nan"), "x", "\ud800", [], [[]], {}, {"a": 1})
KEYS = (*GOOD, "head_dim", "num_key_value_heads", "layer_types", "sliding_window", "text_config", "n_embd")


def facts(directory: Path) -> tuple[Any, ...]:
    """The questions of a plan to the files."""
    return model_shape(directory), num_parameters(directory), usual_answers(directory)


def test_the_files_that_the_others_are_made_of_are_understood(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GOOD))
    shape, number, answers = facts(tmp_path)
    assert (shape.layers, shape.hidden_size, answers) == (2, 64, "")
    assert number > 64 * 256


@pytest.mark.parametrize("key", KEYS)
def test_any_value_of_a_configuration_gives_sizes_or_none(tmp_path: Path, key: str) -> None:
    for value in VALUES:
        (tmp_path / "config.json").write_text(json.dumps({**GOOD, key: value}))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
        shape, number, _ = facts(tmp_path)
        assert number is None or 0 < number < 1 << 50
        assert shape is None or all(0 < size < 1 << 50 for size in (shape.layers, shape.hidden_size, shape.kv_size))


def sparse(path: Path, num_bytes: int, header: bytes = b"") -> None:
    """A file of so many bytes that takes no disk."""
    with path.open("wb") as file:
        file.write(header)
        file.truncate(num_bytes)


def header(length: int, content: bytes = b"") -> bytes:
    """The beginning of a safetensors file."""
    return length.to_bytes(8, "little") + content


def tensors(value: Any) -> bytes:
    """A safetensors file with this header."""
    content = json.dumps(value).encode()
    return header(len(content), content)


def index(name: str) -> str:
    """An index of one tensor in the file of that name."""
    return json.dumps({"weight_map": {"w": name}})


ENTRY = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
FILES: dict[str, Callable[[Path], object]] = {
    "a header of 2^62 bytes": lambda d: (d / "model.safetensors").write_bytes(header(1 << 62)),
    "a header of 2^64 - 1 bytes": lambda d: (d / "model.safetensors").write_bytes(header((1 << 64) - 1)),
    "a header of 32 GiB in a sparse file": lambda d: sparse(d / "model.safetensors", 1 << 36, header(1 << 35)),
    "half a length": lambda d: (d / "model.safetensors").write_bytes(b"\x05\x00"),
    "nothing": lambda d: (d / "model.safetensors").touch(),
    "a header that is a list": lambda d: (d / "model.safetensors").write_bytes(tensors([1])),
    "a header that is deep": lambda d: (d / "model.safetensors").write_bytes(header(100_000, b"[" * 100_000)),
    "a tensor that is a number": lambda d: (d / "model.safetensors").write_bytes(tensors({"w": 1})),
    "a tensor without a shape": lambda d: (d / "model.safetensors").write_bytes(tensors({"w": {}})),
    "a shape of texts": lambda d: (d / "model.safetensors").write_bytes(tensors({"w": {**ENTRY, "shape": ["x"]}})),
    "a shape of lists": lambda d: (d / "model.safetensors").write_bytes(tensors({"w": {**ENTRY, "shape": [[2]]}})),
    "an index that is a list": lambda d: (d / "model.safetensors.index.json").write_text("[]"),
    "an index that is deep": lambda d: (d / "model.safetensors.index.json").write_text("[" * 100_000),
    "an index of 64 GiB": lambda d: sparse(d / "model.safetensors.index.json", 1 << 36),
    "an index of numbers": lambda d: (d / "model.safetensors.index.json").write_text('{"weight_map": {"w": 5}}'),
    "an index that leads upwards": lambda d: (d / "model.safetensors.index.json").write_text(index("../w.safetensors")),
    "an index that leads elsewhere": lambda d: (d / "model.safetensors.index.json").write_text(index("/etc/passwd")),
    "a configuration of 64 GiB": lambda d: sparse(d / "config.json", 1 << 36),
    "a configuration that is deep": lambda d: (d / "config.json").write_text("[" * 100_000),
    "a configuration that is a pipe": lambda d: os.mkfifo(d / "config.json"),
    "a configuration that is a loop": lambda d: (d / "config.json").symlink_to("config.json"),
    "a configuration that is a device": lambda d: (d / "config.json").symlink_to("/dev/zero"),
    "a configuration of bytes": lambda d: (d / "config.json").write_bytes(b"\xff\xfe\x00"),
    "a tokenizer of 64 GiB": lambda d: sparse(d / "tokenizer_config.json", 1 << 36),
    "a tokenizer that is deep": lambda d: (d / "tokenizer_config.json").write_text("[" * 100_000),
    "a tokenizer that is a pipe": lambda d: os.mkfifo(d / "tokenizer_config.json"),
    "weights in a pipe": lambda d: os.mkfifo(d / "model.safetensors"),
    "a template that is a pipe": lambda d: os.mkfifo(d / "chat_template.jinja"),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", FILES)
def test_a_file_with_anything_in_it_is_not_known(tmp_path: Path, name: str) -> None:
    (tmp_path / "w.safetensors").write_bytes(tensors({"w": ENTRY}))
    directory = tmp_path / "model"
    directory.mkdir()
    FILES[name](directory)
    assert facts(directory) == (None, None, "")
    try:
        assert not saved_tensors(directory)
    except ODD as error:
        assert len(str(error).splitlines()) <= 1  # noqa: PT017


REFUSED: dict[str, str] = {
    "an index that leads upwards": "the file '../w.safetensors' of another directory",
    "an index that leads elsewhere": "the file '/etc/passwd' of another directory",
    "an index of numbers": "TypeError",
    "an index that is deep": "nested too deep",
    "an index of 64 GiB": "has 65536 MiB; needs at most 256 MiB",
    "a tokenizer of 64 GiB": "has 65536 MiB; needs at most 256 MiB",
    "a configuration that is a pipe": "'config.json' is a pipe",
    "a configuration that is a device": "'config.json' is a pipe, a device",
    "a template that is a pipe": "'chat_template.jinja' is a pipe",
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", REFUSED)
def test_transformers_reads_no_pipe_no_huge_file_and_no_weights_of_other_directories(tmp_path: Path, name: str) -> None:
    (tmp_path / "w.safetensors").write_bytes(tensors({"w": ENTRY}))
    directory = tmp_path / "model"
    directory.mkdir()
    FILES[name](directory)
    with pytest.raises(ConfigError) as refused:
        check_model_files("model.path", directory)
    assert str(refused.value).startswith("model.path: '")
    assert REFUSED[name] in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


def test_a_directory_of_links_to_files_and_a_name_on_the_hub_may_be_read(tmp_path: Path) -> None:
    (tmp_path / "blob").write_text(index("model-00001.safetensors"))
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "model.safetensors.index.json").symlink_to("../blob")
    (directory / "config.json").symlink_to("../gone")
    check_model_files("model.path", directory)
    check_model_files("model.path", Path("HuggingFaceTB/SmolLM2-135M"))
