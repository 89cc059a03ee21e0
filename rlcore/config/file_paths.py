"""Files that a configuration file names count from its directory, then from the working directory."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcore.config.layers import Source, read_layers
from rlcore.config.sections import BYTES, RunConfig

SUFFIXES = (".yaml", ".yml")
MADE = "rollout.weights_dir"
"""The key of a directory that exists only while a run uses it."""
RUNS = "train.dir"
"""The key of the directory of runs. The saved configuration keeps it as it is set: a resume replaces it."""
PATH_NAMES = ("path", "tokenizer", "chat_template", "weights_dir")
"""Names of keys whose value may be a path without a slash or suffix."""


def directory_of(key: str, origins: Mapping[str, str]) -> Path | None:
    """The directory of the configuration file, or of the file that it links to, that sets the key; None without one."""
    file = Path(origins.get(key, ""))
    if file.suffix not in SUFFIXES or not file.is_file():
        return None
    return (file.resolve() if file.is_symlink() else file).parent


def paths_from_their_files(config: RunConfig, shown: Mapping[str, Any], origins: Mapping[str, str]) -> dict[str, str]:
    """The keys whose path exists in the directory of the file that sets it, with the path from there: those of sources
    and models, and in sections of plugins those of models and of code, `tools.py:add`.

    Absolute paths, interpolated ones, and those of files in the working directory stay as they are.
    """
    paths = {f"data.sources.{name}.path": source.path for name, source in config.data.sources.items()}
    paths |= {f"eval.sources.{name}.path": source.path for name, source in config.eval.sources.items()}
    paths |= {f"model.{name}": getattr(config.model, name) for name in ("path", "tokenizer", "chat_template")}
    paths |= {"reference.path": config.reference.path}
    named = {key: text for key, text in shown.items() if key.startswith("plugins.") and isinstance(text, str)}
    paths |= {key: text for key, text in named.items() if text.rpartition(":")[0].endswith(".py")}
    models = {key: text for key, text in named.items() if key.endswith((".path", ".tokenizer"))}
    found = {}
    for key, path in (paths | models).items():
        directory = directory_of(key, origins)
        if path not in ("", BYTES) and shown.get(key) == path and directory is not None:
            place, attribute = _divided(path)
            from_there = directory / place
            is_there = from_there.is_dir() if key in models else from_there.exists()
            if from_there != Path(place) and is_there:
                found[key] = f"{from_there}{attribute}"
    return found


def plugin_paths(files: Sequence[Source], overrides: Sequence[str]) -> dict[str, str]:
    """`plugins.NAME.path` from the directory of the file that sets it, by plugin, for those whose file is there."""
    found: dict[str, str] = {}
    for layer in read_layers(files, overrides):
        plugins = layer.values.get("plugins")
        for name, section in plugins.items() if isinstance(plugins, Mapping) else ():
            path = section.get("path") if isinstance(section, Mapping) else None
            if not isinstance(path, str):
                continue
            found.pop(name, None)  # a higher layer sets it
            directory = directory_of("path", {"path": layer.origin})
            if directory is not None and directory / path != Path(path) and (directory / path).is_file():
                found[name] = str(directory.absolute() / path)
    return found


def _divided(text: str) -> tuple[str, str]:
    """The path of a text, and the rest, as of `file.py:name`."""
    where, _, attribute = text.rpartition(":")
    return (where, f":{attribute}") if where.endswith(".py") else (text, "")


def with_absolute_paths(values: Mapping[str, Any], origins: Mapping[str, str]) -> dict[str, Any]:
    """The values of all sections with absolute paths, so that they name the same files from any working directory.

    A text is a path if it names a file or directory that exists, alone or as in file.py:name. Interpolated texts and
    arguments of `load_dataset`, whose paths may be those of a repository, stay as they are.
    """
    return {name: _with_absolute(value, name, origins) for name, value in values.items()}


def _with_absolute(value: Any, key: str, origins: Mapping[str, str]) -> Any:
    if isinstance(value, Mapping):
        return {name: _with_absolute(child, f"{key}.{name}", origins) for name, child in value.items()}
    if isinstance(value, list):
        return [_with_absolute(child, key, origins) for child in value]
    return _absolute(value, key, origins) if isinstance(value, str) else value


def _absolute(text: str, key: str, origins: Mapping[str, str]) -> str:
    path, after = _divided(text)
    if not _may_be_path(path, key):
        return text
    named_in = directory_of(key, origins) if key.startswith("reward.functions.") else None
    for place in (named_in, Path.cwd()):
        if place is not None and (key == MADE or os.path.exists(place / path)):
            return f"{(place / path).absolute()}{after}"
    return text


def _may_be_path(text: str, key: str) -> bool:
    name = key.rpartition(".")[2]
    if text in ("", BYTES) or "${" in text or text.startswith("~"):
        return False
    if key == RUNS or (".sources." in key and name != "path"):
        return False
    return name in PATH_NAMES or "/" in text or Path(text).suffix != ""
