"""Checks a start before anything is written: a dry run refuses what the run would refuse."""

from dataclasses import replace

from rlcore.data import training_sources
from rlcore.data.issued import check_same_order
from rlcore.errors import CheckpointError, boundary
from rlcore.plan import RunPlan
from rlcore.report.status import is_held
from rlcore.train import checkpoint, find_checkpoint
from rlcore.train.origin import Start, check_remains, find_origin
from rlcore.train.run_dir import check_directory, choose_directory, in_use


def check_start(plan: RunPlan, start: Start) -> None:
    """ConfigError or CheckpointError for a directory or checkpoint with which the run would not begin.

    The prompts are not compared with those of the checkpoint, because some are left out by their number of tokens.
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
        state, config = checkpoint.load(found).state, plan.config
        with boundary(f"checkpoint '{found}': its state cannot be restored", CheckpointError):
            check_same_order(
                state["order"], training_sources(config.data), plan.prompt_order.offer.name, config.train.seed
            )
