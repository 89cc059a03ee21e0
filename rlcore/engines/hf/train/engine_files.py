"""The files of an engine's state: model or adapter, optimizer, random states, counters."""

from collections.abc import Iterator
from contextlib import nullcontext

from rlcore.engines.hf.load_saved import MODEL_DIR
from rlcore.engines.hf.train.backbone import Model
from rlcore.engines.hf.train.gather import gathered_adapter
from rlcore.engines.hf.train.optimizer import MasterAdamW
from rlcore.engines.hf.train.ranks import Ranks
from rlcore.engines.hf.train.shards import Shards
from rlcore.engines.hf.train.state import weight_files
from rlcore.engines.hf.train.state_files import StateFile
from rlcore.engines.hf.train.training_state import training_state_files
from rlcore.engines.hf.train.unit_files import unit_files


def engine_files(
    model: Model, optimizer: MasterAdamW, shards: Shards | None, ranks: Ranks | None, counters: dict[str, int]
) -> Iterator[StateFile]:
    """This rank's files: `model/` (LoRA: `adapter/`) and `trainer_state/` with `trainer_state.json`.

    The first rank has all of them; with sharding each rank has its part of the training state and some of the files of
    `model/`. All ranks must iterate to the end, because tensors are gathered on the way.
    """
    first, full = ranks is None or ranks.rank == 0, model.adapter is None
    in_units = False
    if shards is not None and ranks is not None and full and model.owns_transformer:
        in_units = True
        yield from (file.below(MODEL_DIR) for file in unit_files(model, shards, ranks, takers=ranks.num))
    weights = None if full else gathered_adapter(model, shards, here=first)
    with nullcontext() if shards is None else shards.by_layers():  # a value head is whole inside
        if first:
            yield from weight_files(model, weights, in_units=in_units)
    if first if shards is None else shards.writes:
        yield from training_state_files(optimizer, counters, part_of(shards)[0])


def part_of(shards: Shards | None) -> tuple[int, int]:
    """(part, number of parts) of this rank's optimizer state."""
    return (0, 1) if shards is None else shards.part
