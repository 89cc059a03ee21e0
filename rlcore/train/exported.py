"""Exports the model of a run or checkpoint to a directory, and to a repository on the Hub."""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from rlcore.config import ModelConfig
from rlcore.engines.hf.load_saved import ADAPTER_DIR
from rlcore.engines.hf.train.model_export import Form, export_model
from rlcore.errors import CheckpointError, ConfigError, boundary
from rlcore.train import checkpoint, find_checkpoint
from rlcore.train.same_model import check_same_base

NAME = re.compile(r"([A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*")

__all__ = ["Exported", "Form", "export_checkpoint"]


@dataclass(frozen=True)
class Exported:
    """A model that was written."""

    path: Path
    step: int
    url: str = ""
    """Its page on the Hub; empty: it was not uploaded."""


def export_checkpoint(source: Path, out: Path, form: Form, push: str | None = None) -> Exported:
    """Verify the checkpoint and write its model; with `push`, upload it to that name.

    Raises ConfigError if the Hub cannot be reached with a token, or if `out` lies among the checkpoints of a run.
    Raises CheckpointError if the checkpoint is missing or damaged, or if its adapter's base has other weights now.
    Both are raised before anything is written.
    """
    if push is not None:
        check_hub(push)
    _check_out(out)
    loaded = checkpoint.load(find_checkpoint(source))
    if form != "adapter":
        _check_base(loaded)
    written = export_model(loaded.path, out, form)
    return Exported(written, loaded.step, "" if push is None else upload(written, push, loaded.step))


def _check_out(out: Path) -> None:
    """ConfigError for a directory in a checkpoint or next to one; a checkpoint with files that its manifest lacks
    cannot be loaded."""
    with boundary(f"export: '{out}' cannot be written; choose a new directory", ConfigError, OSError):
        for place in Path(os.path.realpath(out)).parents:
            if (place / checkpoint.MANIFEST).is_file():
                raise ConfigError(f"export: '{out}' is in the checkpoint '{place}'; choose another directory")
            if place.name == "checkpoints" and (place / checkpoint.POINTER).is_file():
                raise ConfigError(f"export: '{out}' is among the checkpoints of a run; choose another directory")


def _check_base(loaded: checkpoint.LoadedCheckpoint) -> None:
    """CheckpointError if the model that the adapter names as its base is not the one it was trained on."""
    file = loaded.path / ADAPTER_DIR / "adapter_config.json"
    if not file.is_file():
        return
    with boundary(f"export: '{file}' is damaged", CheckpointError):
        settings = json.loads(file.read_text("utf-8"))
        base = ModelConfig(settings["base_model_name_or_path"] or "", settings.get("revision") or "main")
    check_same_base(base, loaded.path, loaded.state)


def check_hub(name: str) -> None:
    """ConfigError unless huggingface_hub is installed, has a token, and `name` can be that of a repository."""
    try:
        from huggingface_hub import get_token
    except ImportError as missing:
        raise ConfigError("--push: huggingface_hub is not installed; pip install huggingface_hub") from missing
    if not NAME.fullmatch(name):
        raise ConfigError(f"--push: '{name}' cannot be a name on the Hub; needs OWNER/NAME")
    if not get_token():
        raise ConfigError("--push: there is no token for the Hub; log in with 'hf auth login', or set HF_TOKEN")


def upload(directory: Path, name: str, step: int) -> str:
    """Upload the directory to the repository, made private if it is new; its address."""
    from huggingface_hub import HfApi

    with boundary(f"--push: '{directory}' is written, the upload to '{name}' failed", ConfigError):
        api = HfApi()
        url = api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=str(directory), commit_message=f"Step {step}")
    return str(url)
