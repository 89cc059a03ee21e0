"""Recognises the models that a run began with. A reference and the base of adapters are read again on a resume."""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlcore.config import ModelConfig, RunConfig
from rlcore.contracts.model_files import model_directory
from rlcore.contracts.reference import REFERENCE
from rlcore.errors import CheckpointError
from rlcore.plan import RunPlan

NUM_PIECES, PIECE_BYTES = 16, 4096
"""Read from each file: training changes nearly every weight, so a few of them show another model."""

MODEL, REFERENCE_MODEL = "model", "reference_model"
"""The digests' keys in the state of a checkpoint."""


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


def model_digests(config: RunConfig) -> dict[str, str]:
    """The digest of the model at `model.path`, and that of a reference which is another model."""
    digests = {MODEL: model_digest(config.model)}
    if config.algo.kl.placement != "none" and config.has_other_reference:
        digests[REFERENCE_MODEL] = model_digest(replace(config.model, path=config.reference.path, revision="main"))
    return digests


def check_same_models(plan: RunPlan, checkpoint: Path, state: Mapping[str, Any], found: Mapping[str, str]) -> None:
    """CheckpointError if the run uses a model whose digest is another than the one in the checkpoint's state.

    An actor whose weights are all in the checkpoint does not use `model.path`, and an empty digest says nothing.
    """
    config = plan.config
    refers = any(worker.request.role.name == REFERENCE.name for worker in plan.workers)
    uses = {
        "the reference would be": refers and not config.has_other_reference,
        "the adapter's base would be": config.actor.lora.enabled,
    }
    whose = next((text for text, applies in uses.items() if applies), "")
    if whose:
        _refuse_other("model.path", config.model.path, whose, checkpoint, (state.get(MODEL, ""), found[MODEL]))
    if REFERENCE_MODEL in found:
        digests = state.get(REFERENCE_MODEL, ""), found[REFERENCE_MODEL]
        _refuse_other("reference.path", config.reference.path, "the reference would be", checkpoint, digests)


def _refuse_other(key: str, path: str, whose: str, checkpoint: Path, digests: tuple[str, str]) -> None:
    saved, found = digests
    if saved and found and saved != found:
        raise CheckpointError(
            f"checkpoint '{checkpoint}': {key}={path} has other weights than when it was saved, and {whose} another "
            f"model; set {key} to the former one, or begin another run with these"
        )


def check_same_base(model: ModelConfig, checkpoint: Path, state: Mapping[str, Any]) -> None:
    """CheckpointError if the checkpoint's adapter would be added to a model with another digest than the saved one."""
    saved, found = state.get(MODEL, ""), model_digest(model)
    if saved and found and saved != found:
        raise CheckpointError(
            f"checkpoint '{checkpoint}': '{model.path}' has other weights than when it was saved, and the adapter's "
            "base would be another model; put the former one back there"
        )
