"""Recognises the model that a run began with. Its reference and the base of its adapters are read again on a resume."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlcore.config import ModelConfig
from rlcore.contracts.model_files import model_directory
from rlcore.contracts.reference import REFERENCE
from rlcore.errors import CheckpointError
from rlcore.plan import RunPlan

NUM_PIECES, PIECE_BYTES = 16, 4096
"""Read from each file: training changes nearly every weight, so a few of them show another model."""

MODEL = "model"
"""The digest's key in the state of a checkpoint."""


def model_digest(model: ModelConfig) -> str:
    """A digest of the names, sizes and some pieces of the weights of the model; '' if there are no safetensors.

    It takes milliseconds, whatever the size. A directory that was moved has the same digest.
    """
    directory = model_directory(model.path, model.revision)
    digest, files = hashlib.blake2b(digest_size=16), sorted(directory.glob("*.safetensors")) if model.path else []
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        with file.open("rb") as opened:
            for piece in range(NUM_PIECES):
                opened.seek(size * piece // NUM_PIECES)
                digest.update(opened.read(PIECE_BYTES))
    return digest.hexdigest() if files else ""


def check_same_model(plan: RunPlan, checkpoint: Path, saved: str, found: str) -> None:
    """CheckpointError if the run uses the model at `model.path` and its digest is another than the saved one.

    An actor whose weights are all in the checkpoint does not use it, and an empty digest says nothing.
    """
    uses = {
        "the reference would be": any(worker.request.role.name == REFERENCE.name for worker in plan.workers),
        "the adapter's base would be": plan.config.actor.lora.enabled,
    }
    whose = next((text for text, applies in uses.items() if applies), "")
    if whose and saved and found and saved != found:
        raise CheckpointError(
            f"checkpoint '{checkpoint}': model.path={plan.config.model.path} has other weights than when it was saved, "
            f"and {whose} another model; set model.path to the former one, or begin another run with these"
        )


def check_same_base(model: ModelConfig, checkpoint: Path, state: Mapping[str, Any]) -> None:
    """CheckpointError if the checkpoint's adapter would be added to a model with another digest than the saved one."""
    saved, found = state.get(MODEL, ""), model_digest(model)
    if saved and found and saved != found:
        raise CheckpointError(
            f"checkpoint '{checkpoint}': '{model.path}' has other weights than when it was saved, and the adapter's "
            "base would be another model; put the former one back there"
        )
