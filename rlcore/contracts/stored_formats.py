"""The number formats of a model's files, and checkpoints that training cannot start from: quantised and incomplete.

Plans use this module before anything starts, and engines when they load a model; torch is not imported.
"""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlcore.contracts.model_files import (
    ODD,
    check_model_files,
    check_settings,
    missing_weights,
    model_directory,
    stated_size,
)
from rlcore.errors import ConfigError

NARROW = ("F8", "F6_", "F4")
"""Prefixes of safetensors formats of 8 bits and fewer, whose numbers need scales from other tensors."""
WIDE = ("F64", "F32", "BF16", "F16")
"""Formats that a weight may have; other tensors, such as masks and positions, may be integers."""


def check_stored(path_key: str, path: str) -> None:
    """ConfigError for a model directory with files that transformers must not read, that hold quantised or integer
    weights, or that are missing.

    A path that is not a directory passes. Raises one of `ODD` or RecursionError for a damaged config.json.
    """
    directory = Path(path)
    check_model_files(f"{path_key}='{path}'", directory)
    _check_complete(path_key, path, directory)
    _check_formats(path_key, path, directory)


def check_planned(path_key: str, path: str, revision: str = "main") -> None:
    """ConfigError if this machine has the model's files or its config.json, and they say that it is quantised, or if a
    directory lacks a file that its index names, has a shorter file than its header says, or a damaged config.json.

    Passes for unknown models and for files that are damaged in other ways: loading the model reports those.
    """
    directory = model_directory(path, revision)
    try:
        check_model_files(path, directory)
    except ConfigError:
        return
    with suppress(*ODD, RecursionError):
        if Path(path).is_dir():  # the Hub's cache gets the other files when the run begins
            _check_complete(path_key, path, directory)
        _check_formats(path_key, path, directory)


def check_not_quantised(path_key: str, path: str, settings: Any) -> None:
    """ConfigError if a model's configuration says that it is quantised."""
    if settings:
        method = settings.get("quant_method", "unknown") if isinstance(settings, dict) else type(settings).__name__
        raise ConfigError(
            f"{path_key}='{path}': its weights are quantised (quant_method={method}), which training cannot start "
            "from; needs float32, bfloat16 or float16: choose the checkpoint that this one was quantised from"
        )


def _check_complete(path_key: str, path: str, directory: Path) -> None:
    """ConfigError if the directory's index of weights names a file that is not there, a file of weights is cut off, or
    config.json is damaged."""
    if missing := missing_weights(directory):
        more = f" and {len(missing) - 1} more" if missing[1:] else ""
        raise ConfigError(
            f"{path_key}='{path}': found no '{missing[0]}'{more}, which model.safetensors.index.json names; needs "
            "every file of the model: copy or download it again"
        )
    check_settings(path_key, path, directory)
    for file in filter(Path.is_file, sorted(directory.glob("*.safetensors"))):
        has, needed = file.stat().st_size, stated_size(file)
        if has < needed:
            raise ConfigError(
                f"{path_key}='{path}': '{file.name}' has {has} bytes, and its header says {needed}; needs the whole "
                "file: copy or download it again"
            )


def _check_formats(path_key: str, path: str, directory: Path) -> None:
    """ConfigError if config.json or the headers of the weights say that the model of a directory is quantised."""
    config_file = directory / "config.json"
    if config_file.is_file():
        check_not_quantised(path_key, path, json.loads(config_file.read_text("utf-8")).get("quantization_config"))
    for file in filter(Path.is_file, sorted(directory.glob("*.safetensors"))):
        for name, found in _formats(file):
            if found.startswith(NARROW) or (name.endswith("weight") and found not in WIDE):
                raise ConfigError(
                    f"{path_key}='{path}': tensor '{name}' is stored as {found}, which training cannot start from; "
                    "needs float32, bfloat16 or float16: choose the checkpoint that this one was quantised from"
                )


def _formats(file: Path) -> Iterator[tuple[str, str]]:
    """Name and number format of each tensor of a safetensors file; nothing for other files."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        try:
            header = json.loads(opened.read(length)) if length < 2**27 else {}
        except (ValueError, RecursionError):  # loading it reports the error
            return
    for name, tensor in header.items() if isinstance(header, dict) else ():
        if name != "__metadata__" and isinstance(tensor, dict):
            yield name, str(tensor.get("dtype", ""))
