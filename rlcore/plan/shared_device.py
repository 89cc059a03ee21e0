"""Fits rollout replicas onto the actor's devices before workers are planned: chooses the share of a device that they
reserve, and whether the actor is offloaded while they serve.

If a device has room for replicas with all rows of a step next to an actor that trains, they stay awake. Otherwise roles
on one device take turns, so two phases count: replicas serve next to resting roles, and the actor trains next to
sleeping ones. `rlcore.plan.colocation` checks this again with all roles of the run.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from rlcore.config import RunConfig
from rlcore.config.checks import lookup
from rlcore.contracts.model_files import model_directory, num_parameters
from rlcore.contracts.requests import ModelFacts
from rlcore.plan.activations import BYTES, longest_row, masked_row, sized, update_bytes
from rlcore.plan.catalog import rollout_key
from rlcore.plan.machine_facts import GIB, Facts
from rlcore.plan.memory import (
    CONTEXT_BYTES,
    at_work_bytes_per_parameter,
    cached_bytes_per_token,
    frozen_bytes_per_parameter,
    gathered_for_update,
    is_whole,
    resting_share,
    training_bytes_per_parameter,
)
from rlcore.plan.sharded_memory import saving_bytes

FILLED = 0.95
"""Share of the memory left by resting roles that replicas may get; the rest is for fragmentation."""
MOST_SHARE, SHARE_STEP = 0.85, 0.05
LEAST_ROWS = 64
"""Rows that an engine should hold at a time, halfway through the longest response; all rows of a step if those are
fewer."""
WEIGHTS_FACTOR, PROFILE_BYTES = 1.1, 2 * GIB
"""Factor on an engine's weights for derived copies, and the activations of its largest prefill."""
ASLEEP_BYTES = 2 * GIB
"""Memory that an engine with CUDA graphs does not release while it sleeps; its plugin states the exact figure."""
AWAKE_FRAC = 0.9
"""Share of a device that the plan may fill with roles that train and serve there at the same time; the rest is left for
allocator fragmentation."""
HOST_SHARE = 0.8
"""Share of the host's memory that offloaded state may fill."""


@dataclass(frozen=True)
class Fit:
    """Replicas on the actor's devices."""

    share: float
    """Share of a device's memory for a replica that is awake."""
    offload: bool
    """True if the actor keeps weights and optimizer state in host memory while they serve."""
    awake: bool = False
    """True if they stay awake while the actor trains, according to the sizes of these roles."""


def shares_device(config: RunConfig, facts: Facts) -> bool:
    """True if replicas would get the actor's devices: all of them together as many as it has ranks, and a schedule in
    which they sleep. A replica of several devices spans those of neighbouring ranks.

    If the user declares pools, these decide.
    """
    crowded = facts.gpus < config.actor.data_parallel + config.rollout.replicas * replica_devices(config)
    return not why_not_shared(config, facts) and (crowded or config.cluster.layout == "colocated")


def why_not_shared(config: RunConfig, facts: Facts) -> str:
    """The setting that keeps replicas off the actor's devices, worded as the end of a sentence; empty if none does."""
    cluster, schedule = config.cluster, config.schedule
    pools = {
        "cluster.pools": bool(cluster.pools),
        "rollout.pool": bool(config.rollout.pool),
        "cluster.train_pool": cluster.train_pool != type(cluster)().train_pool,
    }
    named = [key for key, is_set in pools.items() if is_set]
    if named:
        return (
            f"{' and '.join(named)} place{'' if len(named) > 1 else 's'} roles in pools, so the plan shares no devices"
        )
    if cluster.layout == "split":
        return "cluster.layout=split gives replicas separate devices"
    if schedule.max_staleness:
        return f"schedule.max_staleness={schedule.max_staleness} samples while the actor trains, so they take no turns"
    if schedule.stream_minibatches:
        return "schedule.stream_minibatches=true samples while the actor trains, so they take no turns"
    ranks, devices = config.actor.data_parallel, config.rollout.replicas * replica_devices(config)
    if devices != ranks <= facts.gpus:
        return (
            f"rollout.replicas={config.rollout.replicas} of {replica_devices(config)} each are {devices} devices, and "
            f"the actor has {ranks}; sharing needs equal numbers"
        )
    return "" if ranks <= facts.gpus else f"actor.data_parallel={ranks} needs as many devices"


def replica_devices(config: RunConfig) -> int:
    """Devices of a replica, as the settings of the GPU backend say; 1 if its plugin is not enabled."""
    return int(_setting(config, "replica_devices", 1))


def without_graphs(config: RunConfig) -> bool:
    """True if the settings of the GPU backend say that its engines keep no CUDA graphs; False if its plugin is not
    enabled."""
    return bool(_setting(config, "without_graphs", False))


def _setting(config: RunConfig, name: Literal["replica_devices", "without_graphs"], otherwise: Any) -> Any:
    try:
        return lookup(config, rollout_key(name))
    except KeyError:
        return otherwise


def fit_replicas(
    config: RunConfig, facts: Facts, *, rows: int, offload: bool | None, share: float | None, is_chosen: bool
) -> Fit | None:
    """A share with room for all rows if replicas can stay awake with it; else the largest that fits, without offload if
    that leaves enough; None if none fits or sizes are unknown.

    `rows`: decoded at a time. `offload` and `share`: the user's settings; None: not set. `is_chosen`: the user chose
    replicas, so room for a single row is enough.
    """
    if facts.usable_gpu_bytes is None or facts.parameters is None or facts.shape is None:
        return None
    ample = ample_share(config, facts, rows)
    if share is None and not offload and _trains(config, facts, offload=False, awake=ample):
        return Fit(ample, offload=False, awake=True)
    ways = [False, True] if offload is None and _may_offload(config, facts) else [bool(offload)]
    for way in ways:
        found = room_for_replicas(config, facts, offload=way)
        wanted = found if share is None else share
        if needed_share(config, facts, is_chosen=is_chosen) <= wanted <= found and _trains(config, facts, offload=way):
            return Fit(wanted, way)
    return None


def room_for_replicas(config: RunConfig, facts: Facts, *, offload: bool) -> float:
    """The share of a device that resting roles leave free, rounded down to a step."""
    total, usable = facts.gpu_memory_bytes or 0, facts.usable_gpu_bytes or 0
    if not total:
        return 0.0
    engine = replace(config.actor, offload=offload)
    rests = 0 if offload else int(resting_share(engine) * trained_bytes(config, facts))
    if not is_whole(engine):  # its shard, and a layer of all ranks, are on the device while it is saved
        rests += saving_bytes(engine, ModelFacts(facts.parameters, facts.shape))
    reference, processes = _reference_bytes(config, facts)
    room = FILLED * (usable - rests - reference - (2 + _critics(config) + processes) * CONTEXT_BYTES)
    steps = int(min(MOST_SHARE, room / total) / SHARE_STEP + 1e-9)
    return round(max(0, steps) * SHARE_STEP, 2)


def ample_share(config: RunConfig, facts: Facts, rows: int) -> float:
    """The share, rounded up to a step, with which an engine holds these rows at their longest.

    They may be more than a step has: an evaluation decodes as many rows at a time.
    """
    if facts.shape is None or not facts.gpu_memory_bytes:
        return 1.0
    weights = WEIGHTS_FACTOR * BYTES[config.actor.dtype] * (facts.parameters or 0)
    spread = weights + rows * longest_row(config) * cached_bytes_per_token(facts.shape, config.actor.dtype)
    needed = spread / replica_devices(config) + PROFILE_BYTES + _graph_bytes(config)
    return round(math.ceil(needed / facts.gpu_memory_bytes / SHARE_STEP) * SHARE_STEP, 2)


def needed_share(config: RunConfig, facts: Facts, *, is_chosen: bool = False) -> float:
    """The smallest share that makes replicas worthwhile: weights, and keys and values of some rows.

    For replicas that the user chose: of the one row that an engine must have room for, the longest.
    """
    shape, dtype, devices = facts.shape, config.actor.dtype, replica_devices(config)
    if shape is None or not facts.gpu_memory_bytes:
        return 1.0
    samples = config.train.prompts_per_step * config.rollout.samples_per_prompt
    rows = min(LEAST_ROWS, config.rollout.max_rows, -(-samples // config.rollout.replicas))
    weights = WEIGHTS_FACTOR * BYTES[dtype] * (facts.parameters or 0)
    row = config.data.max_prompt_tokens + config.rollout.max_tokens // 2
    tokens = longest_row(config) if is_chosen else rows * row
    cached = tokens * cached_bytes_per_token(shape, dtype)
    return ((weights + cached) / devices + PROFILE_BYTES) / facts.gpu_memory_bytes


def trained_bytes(config: RunConfig, facts: Facts) -> int:
    """Weights, gradients and optimizer state of a rank of the actor, and of an equally large critic."""
    return int((1 + _critics(config)) * training_bytes_per_parameter(config.actor) * (facts.parameters or 0))


def _trains(config: RunConfig, facts: Facts, *, offload: bool, awake: float = 0.0) -> bool:
    """True if the actor can train while replicas sleep, or stay awake with this share of the device."""
    shape, engine, parameters = facts.shape, config.actor, facts.parameters or 0
    if shape is None:
        return False
    tokens = max(engine.micro_batch_tokens, longest_row(config))
    size = sized(config, tokens, longest_row(config))
    work = update_bytes(shape, engine, size, "cuda", masked_row(config, shape))
    work += gathered_for_update(engine, ModelFacts(parameters, shape))
    held = trained_bytes(config, facts)
    if offload:
        at_work = int(at_work_bytes_per_parameter(engine) * parameters)
        held, work = (1 + _critics(config)) * at_work, max(work, trained_bytes(config, facts) - at_work)
    reference, processes = _reference_bytes(config, facts)
    others = reference + (2 + _critics(config) + processes) * CONTEXT_BYTES
    usable = facts.usable_gpu_bytes or 0
    if awake:
        return held + work + others + awake * (facts.gpu_memory_bytes or 0) <= AWAKE_FRAC * usable
    return held + work + others + _graph_bytes(config) <= usable


def _graph_bytes(config: RunConfig) -> int:
    """Memory of an engine's CUDA graphs, which it keeps while it sleeps."""
    return 0 if without_graphs(config) else ASLEEP_BYTES


def _may_offload(config: RunConfig, facts: Facts) -> bool:
    """True if the engine supports `actor.offload` and the host has memory for the offloaded state."""
    engine = config.actor
    if engine.lora.enabled:
        return False
    moved = trained_bytes(config, facts) * engine.data_parallel
    return facts.memory_bytes is None or moved <= HOST_SHARE * facts.memory_bytes


def _reference_bytes(config: RunConfig, facts: Facts) -> tuple[int, int]:
    """(bytes, processes) of a reference that is a separate model."""
    second = config.algo.kl.placement != "none" and (not config.actor.lora.enabled or config.reference.path)
    if not second:
        return 0, 0
    other = model_directory(config.reference.path) if config.has_other_reference else None
    parameters = num_parameters(other) if other else None
    return int(frozen_bytes_per_parameter(config.actor) * (parameters or facts.parameters or 0)), 1


def _critics(config: RunConfig) -> int:
    """The number of models that are trained in addition to the actor, assumed to be of the same size."""
    return int(config.critic.engine != "none")
