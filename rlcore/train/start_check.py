"""Checks a start before anything is written: a dry run refuses what the run would refuse."""

from dataclasses import replace
from pathlib import Path

from rlcore.contracts.model_files import model_directory, model_shape
from rlcore.data import training_sources
from rlcore.data.issued import check_same_order
from rlcore.engines.hf.load_saved import ADAPTER_DIR, MODEL_DIR, check_kind
from rlcore.errors import CheckpointError, boundary
from rlcore.plan import RunPlan
from rlcore.report.status import is_held
from rlcore.train import checkpoint, find_checkpoint
from rlcore.train.origin import Start, check_remains, find_origin
from rlcore.train.run_dir import check_directory, choose_directory, in_use
from rlcore.train.same_model import check_same_models, model_digests

ENGINE = "hf"
"""The backend whose checkpoints hold `model/` or `adapter/`."""
SIZES = ("layers", "hidden_size", "inner_size", "kv_size", "vocabulary")
"""The sizes of a `ModelShape` that decide the shapes of tensors."""


def check_start(plan: RunPlan, start: Start) -> None:
    """ConfigError or CheckpointError for a directory or checkpoint with which the run would not begin.

    The prompts are not compared with those of the checkpoint, because some are left out by their number of tokens. The
    tensors of the model are not compared either; its sizes are.
    """
    if start.checkpoint is not None:
        start = replace(start, checkpoint=find_checkpoint(start.checkpoint))
    found = start.checkpoint
    if start.resume or plan.config.train.name:  # else the directory is a new one
        run_dir = choose_directory(plan.loaded, start.resume)
        check_directory(run_dir, start.resume)
        if is_held(run_dir):
            raise in_use(run_dir)
        found = find_origin(check_remains(run_dir, start), start).checkpoint
    if found is not None:
        _check_model(plan, found)
        state, config = checkpoint.load(found).state, plan.config
        with boundary(f"checkpoint '{found}': its state cannot be restored", CheckpointError):
            check_same_order(
                state["order"], training_sources(config.data), plan.prompt_order.offer.name, config.train.seed
            )
        if start.checkpoint is None:  # that of another run may be combined with another reference
            check_same_models(plan, found, state, model_digests(config))


def _check_model(plan: RunPlan, found: Path) -> None:
    """CheckpointError for a checkpoint of an adapter instead of a model, or of a model of other sizes."""
    config = plan.config
    if config.actor.backend != ENGINE:
        return
    check_kind(found / (ADAPTER_DIR if config.actor.lora.enabled else MODEL_DIR), config.actor.lora.enabled, "actor")
    saved, now = model_shape(found / MODEL_DIR), model_shape(model_directory(config.model.path, config.model.revision))
    if saved is None or now is None:
        return
    for name in SIZES:
        was, is_now = getattr(saved, name), getattr(now, name)
        if was != is_now:
            raise CheckpointError(
                f"checkpoint '{found}': its model has {name}={was}, and model.path={config.model.path} has {is_now}; "
                "set model.path to the former model, or begin another run with this one"
            )
