"""Exports a checkpoint as a LoRA adapter or a full model directory."""

import shutil
from pathlib import Path
from typing import Any, Literal

from rlcore.contracts.model_files import readable_as
from rlcore.engines.hf.load_saved import ADAPTER_DIR, MODEL_DIR
from rlcore.errors import CheckpointError, ConfigError, boundary

Form = Literal["adapter", "merged", "hf"]


def export_model(checkpoint_dir: Path, out_dir: Path, form: Form) -> Path:
    """Write the model of a checkpoint into the new directory `out_dir`, which is returned.

    hf: a directory that `AutoModelForCausalLM.from_pretrained` opens without peft (a LoRA adapter is merged into its
    base); merged: the same, for LoRA checkpoints only; adapter: peft's adapter directory as it is. ConfigError if the
    checkpoint has no adapter, or `out_dir` is not empty or cannot be written; CheckpointError if the checkpoint has no
    model.
    """
    with boundary(f"export: '{out_dir}' cannot be written; choose a new directory", ConfigError, OSError):
        if out_dir.exists() and any(out_dir.iterdir()):
            raise ConfigError(f"export: '{out_dir}' is not empty; choose a new directory")
        return _written(checkpoint_dir, out_dir, form)


def _written(checkpoint_dir: Path, out_dir: Path, form: Form) -> Path:
    adapter, model = checkpoint_dir / ADAPTER_DIR, checkpoint_dir / MODEL_DIR
    if not adapter.is_dir():
        if not (model / "config.json").is_file():
            raise CheckpointError(f"export: '{checkpoint_dir}' holds neither '{MODEL_DIR}/' nor '{ADAPTER_DIR}/'")
        if form != "hf":
            raise ConfigError(
                f"export: form '{form}' needs a LoRA checkpoint, and '{checkpoint_dir}' is a full model; choose hf"
            )
        shutil.copytree(model, out_dir, dirs_exist_ok=True)
        return out_dir
    if form == "adapter":
        shutil.copytree(adapter, out_dir, dirs_exist_ok=True)
    else:
        _merge(adapter, out_dir)
    if model.is_dir():  # for a LoRA run only the tokenizer's files
        shutil.copytree(model, out_dir, dirs_exist_ok=True)
    if (out_dir / "config.json").is_file():
        readable_as(out_dir / "config.json", out_dir)
    return out_dir


def _merge(adapter: Path, out_dir: Path) -> None:
    """Write the adapter's base with the adapter added to its weights."""
    try:
        from peft import AutoPeftModelForCausalLM
    except ImportError as missing:
        raise ConfigError("export: the package peft is not installed; pip install peft") from missing
    with boundary(f"export: '{adapter}' or its base model", CheckpointError):
        loaded: Any = AutoPeftModelForCausalLM.from_pretrained(adapter, dtype="auto")
        loaded.merge_and_unload().save_pretrained(out_dir)
