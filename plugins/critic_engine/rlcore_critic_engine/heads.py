"""Finds a critic's starting value head in a model's files, without reading tensors or importing torch.

Letter: H hidden size.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlcore.config import ModelConfig
from rlcore.contracts.model_files import SavedTensor, model_directory, model_shape, saved_tensors
from rlcore.errors import ConfigError, boundary
from rlcore_critic_engine.settings import SECTION, CriticSettings

HEAD_FILE = "value_head.safetensors"
"""File of a saved critic's head: `rlcore.engines.hf.VALUE_HEAD_FILE`, which cannot be imported without torch."""
NAMES = ("score", "classifier", "v_head.summary", "v_head", "value_head", "summary")
"""Names of heads in transformers' sequence and token classifiers, TRL's value models, and others."""
CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification")
"""Suffixes of transformers' class names whose head gives scores."""


@dataclass(frozen=True)
class StartingHead:
    """The initial weights of a critic's value head."""

    kind: Literal["new", "saved", "classifier", "unknown"]
    """unknown: the model's files are not on this machine yet."""
    text: str
    """A description for plan and log."""
    weight: SavedTensor | None = None
    """(1, H), for a classifier's head."""
    bias: SavedTensor | None = None
    """(1,), for a classifier's head with a bias."""


def starting_head(policy: ModelConfig, settings: CriticSettings) -> StartingHead:
    """The head that `settings.head` names; with 'planned' the model's own, or a new one if it has none.

    ConfigError for a head that does not fit: several outputs, another hidden size, no tensors in the files.
    """
    path = settings.path or policy.path
    directory = model_directory(path, settings.revision if settings.path else policy.revision)
    who = f"{SECTION}.path='{path}'" if settings.path else f"model.path='{path}'"
    if settings.head == "saved" or (settings.head == "planned" and (directory / HEAD_FILE).is_file()):
        return StartingHead("saved", f"the head of the saved critic '{path}'")
    if settings.trunk == "actor":
        return StartingHead("new", "new, zero, on the actor's trunk")
    if not (directory / "config.json").is_file():
        if settings.head == "new":
            return StartingHead("new", "new, zero")
        return StartingHead("unknown", f"the head of '{path}', whose files are not on this machine yet, or new")
    return _of_model(directory, who, path, settings)


def _of_model(directory: Path, who: str, path: str, settings: CriticSettings) -> StartingHead:
    with boundary(f"{who}: reading its config.json and the headers of its safetensors files", ConfigError):
        architecture = _architecture(directory)
        tensors = saved_tensors(directory)
    found = [name for name in NAMES if f"{name}.weight" in tensors]
    if settings.head == "new":
        left_out = f"; the head '{found[0]}' of '{path}' is left out" if found else ""
        return StartingHead("new", f"new, zero{left_out}")
    is_classifier = architecture.endswith(CLASSIFIERS)
    if settings.head == "planned" and not found and not is_classifier:
        return StartingHead("new", "new, zero")
    what = architecture or "model"
    if not found:
        raise ConfigError(
            f"{who}: {_nothing(what, directory, tensors)}; needs {' or '.join(f'{name}.weight' for name in NAMES)} in "
            f"safetensors files; save the model with its head, or set {SECTION}.head=new"
        )
    if len(found) > 1:
        raise ConfigError(
            f"{who}: it has {len(found)} heads, {' and '.join(found)}, and a critic starts from one; leave the others "
            f"out of its files, or set {SECTION}.head=new"
        )
    [name] = found
    weight, bias = tensors[f"{name}.weight"], tensors.get(f"{name}.bias")
    _check_shapes(who, name, what, weight, bias, directory)
    return StartingHead("classifier", f"the head '{name}' of the {what} '{path}'", weight, bias)


def _architecture(directory: Path) -> str:
    """The name of the model's class from its config.json; empty if absent."""
    config: Any = json.loads((directory / "config.json").read_text("utf-8"))
    named = config.get("architectures") or [""]
    return str(named[0])


def _nothing(what: str, directory: Path, tensors: dict[str, SavedTensor]) -> str:
    if not tensors:
        others = sorted(path.name for path in directory.glob("*.bin"))
        return f"the {what} has no safetensors files" + (f" (but {', '.join(others)})" if others else "")
    return f"the {what} has {len(tensors)} tensors and no head of scores among them"


def _check_shapes(
    who: str, name: str, what: str, weight: SavedTensor, bias: SavedTensor | None, directory: Path
) -> None:
    """ConfigError unless the head maps the model's hidden state to one number."""
    instead = f"or set {SECTION}.head=new"
    shape = list(weight.shape)
    if len(shape) != 2 or shape[0] != 1:
        outputs = f"{shape[0]} outputs (num_labels)" if len(shape) == 2 else f"shape {shape}"
        raise ConfigError(
            f"{who}: the head '{name}' of the {what} has {outputs}, and a critic needs one; choose a model with "
            f"num_labels=1, {instead}"
        )
    known = model_shape(directory)
    if known is not None and shape[1] != known.hidden_size:
        raise ConfigError(
            f"{who}: the head '{name}' of the {what} reads {shape[1]} numbers, and its hidden states have "
            f"{known.hidden_size}; choose a model whose files belong together, {instead}"
        )
    if bias is not None and list(bias.shape) != [1]:
        raise ConfigError(
            f"{who}: the bias of the head '{name}' has shape {list(bias.shape)}, and needs [1]; choose a model with "
            f"num_labels=1, {instead}"
        )
