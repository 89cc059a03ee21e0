"""Prepares an engine's model: loads, shards and checks it."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from rlcore.config import EngineConfig, ModelConfig
from rlcore.engines.hf.train.compiled import CompiledLayers
from rlcore.engines.hf.train.model import AnyModel, ModelKind, check_model, load_masters, load_rows
from rlcore.engines.hf.train.prefix_trial import check_context, check_shared_prefix
from rlcore.engines.hf.train.ranks import Ranks
from rlcore.engines.hf.train.sharded_load import Rows
from rlcore.engines.hf.train.shards import Shards, mesh_of
from rlcore.types import SharedPrefix


@dataclass(frozen=True, eq=False)
class Started:
    """The model, its shards if it is sharded, and the initial values of masters by parameter name."""

    model: AnyModel
    shards: Shards | None
    masters: dict[str, Tensor]


def start_model(
    kind: ModelKind,
    model: ModelConfig | AnyModel,
    config: EngineConfig,
    ranks: Ranks | None,
    device: torch.device,
    section: str,
    path_key: str,
    shared_prefix: SharedPrefix,
    seeded: AbstractContextManager[None],
    *,
    trains: bool,
) -> Started:
    """Load a model, or use a loaded one; ConfigError if it is not suitable.

    With sharding each rank reads only its rows, and masters are rows, too. Random numbers are drawn in `seeded`. Unless
    it `trains`, a loaded model is frozen.
    """
    mesh = mesh_of(ranks, config.dp_replicate, section) if ranks is not None and config.sharding == "fsdp2" else None
    rows: Rows = {}
    if isinstance(model, ModelConfig):
        with seeded:
            loaded, rows = load_rows(
                kind,
                model,
                dtype=config.dtype,
                device=str(device),
                lora=config.lora,
                gradient_checkpointing=config.gradient_checkpointing,
                section=section,
                path_key=path_key,
                mesh=mesh,
            )
        if not trains:
            loaded.requires_grad_(False)
    else:
        loaded = model
    shards = None if mesh is None or ranks is None else Shards(loaded, ranks, mesh, rows)
    with nullcontext() if shards is None else shards.by_layers():
        if isinstance(model, ModelConfig):
            check_model(loaded, path_key, model.path, section)
        check_shared_prefix(loaded, shared_prefix, section)
        if ranks is not None and ranks.context is not None:
            check_context(loaded, shared_prefix, ranks.context, section)
    if config.compile:
        loaded.compiled = CompiledLayers(loaded.transformer)
    masters = load_masters(kind, model, loaded, path_key, mesh) if isinstance(model, ModelConfig) else {}
    return Started(loaded, shards, masters)
