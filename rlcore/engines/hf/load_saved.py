"""Loads the model of a checkpoint or an export with transformers. Importing this does not import torch."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlcore.errors import CheckpointError, ConfigError

MODEL_DIR = "model"
ADAPTER_DIR = "adapter"


def model_directory(checkpoint_dir: Path) -> Path:
    """The directory in a checkpoint that `from_pretrained` opens: the adapter of a LoRA run, else the model."""
    adapter = checkpoint_dir / ADAPTER_DIR
    return adapter if adapter.is_dir() else checkpoint_dir / MODEL_DIR


def load_model(checkpoint_dir: Path, **arguments: Any) -> Any:
    """The model; `arguments` are those of `from_pretrained`. ConfigError when it is an adapter, and peft is missing."""
    from transformers import AutoModelForCausalLM

    directory = model_directory(checkpoint_dir)
    if directory.name == ADAPTER_DIR and find_spec("peft") is None:
        raise ConfigError("load_model: the run trained an adapter, which needs peft; pip install peft")
    return AutoModelForCausalLM.from_pretrained(directory, **arguments)


def load_tokenizer(checkpoint_dir: Path) -> Any:
    """The tokenizer. ConfigError when the run has none for transformers, as with `model.tokenizer=bytes`."""
    directory = checkpoint_dir / MODEL_DIR
    if not any(directory.glob("tokenizer*")):
        raise ConfigError(
            f"load_tokenizer: found no tokenizer in '{directory}', as in runs with model.tokenizer=bytes; needs a run "
            "with a tokenizer of transformers"
        )
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


def check_kind(source: Path, has_adapter: bool, section: str) -> None:
    """CheckpointError if the checkpoint of a whole model is to be restored into an adapter, or the other way round.

    A critic's `model/` has its value head, also next to an adapter; only a whole model has a configuration.
    """
    directory, other = source.parent, "false" if has_adapter else "true"
    is_whole, is_adapter = (directory / MODEL_DIR / "config.json").is_file(), (directory / ADAPTER_DIR).is_dir()
    if (is_whole, is_adapter) == (has_adapter, not has_adapter):
        found, needed = ("a whole model", "a LoRA adapter") if has_adapter else ("a LoRA adapter", "a whole model")
        raise CheckpointError(
            f"checkpoint '{directory}': it holds {found}, and this run trains {needed}; needs "
            f"{section}.lora.enabled={other}, as it was when it was saved, or a new run that starts from the exported "
            "model"
        )
    if not source.is_dir():
        kind = "a LoRA adapter" if has_adapter else "a full model"
        raise CheckpointError(f"checkpoint '{directory}': it has no '{source.name}/', and {kind} is to be restored")
