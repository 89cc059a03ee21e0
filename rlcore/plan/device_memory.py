"""The memory of every device in each phase of a run: the numbers that `rlcore plan` shows, and that refuse a plan.

Counts weights and optimizer state of every role on a device, or the share that it reserves; activations of one role at
a time; and the CUDA context of each process. A sleeping role holds only `asleep_bytes`. A role with `offload` holds
little while servers serve, and either activations or optimizer state while it trains. Unknown roles are left out, as in
`memory_estimate`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from rlcore.config import EngineConfig, RunConfig
from rlcore.contracts.actor import ACTOR
from rlcore.contracts.clusters import PoolPlan, WorkerPlan
from rlcore.contracts.requests import ModelFacts
from rlcore.contracts.rollout import ROLLOUT
from rlcore.errors import PlanError
from rlcore.plan.activations import BYTES, forward_bytes
from rlcore.plan.gathered import gathered_bytes, largest_unit
from rlcore.plan.machine_facts import GIB, Facts
from rlcore.plan.memory import (
    CONTEXT_BYTES,
    at_work_bytes,
    embedded_needs,
    frozen_bytes_per_parameter,
    held_and_working_bytes,
    held_bytes,
    is_whole,
    resting_share,
    update_needs,
)
from rlcore.plan.memory_limits import SHARDS, DeviceMemoryError, too_large
from rlcore.plan.sharded_memory import sharded_bytes

PHASES = ("start", "sample", "score", "update", "hand-over", "save")
SERVING, TRAINING = "serving", "training"
"""Parts of a step. Servers on the actor's devices sleep during the second."""
PARTS = {SERVING: ("sample", "save", "hand-over"), TRAINING: ("update", "score")}


class RoleBytes(NamedTuple):
    """One rank on a device in a phase."""

    role: str
    held: int
    """Resident bytes, the CUDA context included."""
    working: int
    """Further bytes while it works."""


Phases = Mapping[str, Sequence[RoleBytes]]
"""The ranks on a device by phase, in the order in which they start."""


@dataclass(frozen=True)
class DeviceRoles:
    """The part of a plan that decides what is on a device."""

    config: RunConfig
    pools: Sequence[PoolPlan]
    workers: Sequence[WorkerPlan]
    colocated_roles: Sequence[str]
    memory: Mapping[str, int]
    """By role, as in `memory_estimate`."""
    facts: Facts


def phases_of_devices(roles: DeviceRoles) -> dict[int, dict[str, list[RoleBytes]]]:
    """Every rank on each device, by phase."""
    pools = {pool.name: pool for pool in roles.pools}
    devices: dict[int, dict[str, list[RoleBytes]]] = {}
    for worker in roles.workers:
        if worker.request.embedded_in is not None or not worker.request.gpus:
            continue
        phases = (_of_server if serves(worker) else _of_trainer)(roles, worker)
        for gpu in devices_of_ranks(worker, pools[worker.request.pool]):
            for phase, (held, working) in phases.items():
                entry = RoleBytes(worker.request.role.name, CONTEXT_BYTES + held, working)
                devices.setdefault(gpu, {}).setdefault(phase, []).append(entry)
    return devices


def bytes_by_phase(phases: Phases) -> dict[str, int]:
    """The most bytes of a device in each phase."""
    return {phase: (in_turn if phase == "start" else together)(entries) for phase, entries in phases.items()}


def together(entries: Sequence[RoleBytes]) -> int:
    """Bytes of roles of which one at a time works."""
    return sum(entry.held for entry in entries) + max(entry.working for entry in entries)


def in_turn(entries: Sequence[RoleBytes]) -> int:
    """The most bytes while roles start one after another: those before keep what they hold."""
    held = [entry.held for entry in entries]
    return max(sum(held[: place + 1]) + entry.working for place, entry in enumerate(entries))


def memory_by_phase(roles: DeviceRoles) -> dict[str, dict[str, int]]:
    """Bytes on the fullest device of each pool, by pool and phase."""
    devices = {gpu: bytes_by_phase(phases) for gpu, phases in phases_of_devices(roles).items()}
    return {
        pool.name: {phase: max(devices[gpu][phase] for gpu in pool.gpus if gpu in devices) for phase in PHASES}
        for pool in roles.pools
        if any(gpu in devices for gpu in pool.gpus)
    }


def memory_of_devices(roles: DeviceRoles) -> dict[str, dict[str, int]]:
    """Bytes on the fullest device of each pool in each part of a step; empty without GPUs of known size.

    Without roles that sleep a step has one part. PlanError for a device that any phase exceeds.
    """
    if roles.facts.gpu_memory_bytes is None:
        return {}
    for gpu, phases in sorted(phases_of_devices(roles).items()):
        _check_device(roles, gpu, phases)
    return {
        pool: {part: max(found[phase] for phase in phases) for part, phases in _parts(roles).items()}
        for pool, found in memory_by_phase(roles).items()
    }


def serves(plan: WorkerPlan) -> bool:
    """True if a role works in a separate process while samples are generated and scored.

    Of the roles of the core and the critic, only the rollout is called outside the passes of a step.
    """
    request = plan.request
    called = request.role == ROLLOUT or plan.asked_by.startswith(("agent ", "reward "))
    return called and request.embedded_in is None


def devices_of_ranks(plan: WorkerPlan, pool: PoolPlan) -> list[int]:
    """The device of every rank, as assigned by `rlcore.cluster.worker_context.devices_of`; repeated if it has several
    ranks."""
    request = plan.request
    num = request.replicas * request.ranks * ceil(request.gpus)
    return [pool.gpus[index % len(pool.gpus)] for index in range(num)]


def _held_and_working(roles: DeviceRoles, worker: WorkerPlan) -> tuple[int, int]:
    """(resident bytes of a rank during its phase, further bytes while it works), without its CUDA context."""
    request = worker.request
    if request.device_frac:
        return int(request.device_frac * (roles.facts.gpu_memory_bytes or 0)), 0
    return held_and_working_bytes(worker, roles.memory.get(request.role.name, 0), roles.facts)


def _of_server(roles: DeviceRoles, worker: WorkerPlan) -> dict[str, tuple[int, int]]:
    """`_held_and_working` by phase, of a role that serves. It is awake while a checkpoint is saved.

    It works at the same time as others, so all of its bytes count as resident.
    """
    request, facts = worker.request, roles.facts
    held = sum(_held_and_working(roles, worker))
    if request.role.name not in roles.colocated_roles:
        return dict.fromkeys(PHASES, (held, 0))
    weights = BYTES[roles.config.actor.dtype] * (facts.model_of(request).parameters or 0)
    asleep = request.asleep_bytes
    loading = min(held, asleep + int(weights / max(1.0, request.gpus))) if request.role == ROLLOUT else asleep
    by_phase = {"score": asleep, "update": asleep, "hand-over": loading}
    return {phase: (by_phase.get(phase, held), 0) for phase in PHASES}


def _of_trainer(roles: DeviceRoles, worker: WorkerPlan) -> dict[str, tuple[int, int]]:
    """`_held_and_working` by phase, of a role that computes in the passes and updates of a step."""
    facts, engine, model = roles.facts, worker.request.engine, roles.facts.model_of(worker.request)
    held, working = _held_and_working(roles, worker)
    if engine is None:
        return dict.fromkeys(PHASES, (held, 0)) | {"score": (held, working)}
    if not roles.memory.get(worker.request.role.name):
        return dict.fromkeys(PHASES, (0, 0))
    whole, sharded = held_bytes(worker, facts), not is_whole(engine)
    rests = _resting_bytes(roles, worker)
    updating = held_and_working_bytes(worker, CONTEXT_BYTES + whole + update_needs(*_of(roles, worker)), facts)
    needed = embedded_needs(*_of(roles, worker))
    sampling = 0 if needed is None else at_work_bytes(worker, whole, facts) + needed - rests
    returned = max(0, _weight_bytes(engine, model) - rests) if engine.offload else 0  # for passes, from the host
    gathered = unit = 0
    if sharded:
        every_weight = BYTES[engine.dtype] * (model.parameters or 0)  # ranks that sample hold them between updates
        gathered = gathered_bytes(engine, model, backward=False) if needed is None else every_weight
        unit = largest_unit(engine, model) if needed is None else every_weight
    scoring = gathered + forward_bytes(roles.config, engine, worker.shared_prefix, model.shape)
    starting = sharded_bytes(engine, model)["start"] - (0 if sharded else gathered_bytes(engine, model, backward=False))
    written = returned + unit if sharded else 0  # an unsharded model is read where it rests
    rollout = roles.config.rollout
    bucket = rollout.weights_bucket_mib * 2**20 if rollout.weight_sync in ("nccl", "ipc") else 0
    return {
        "start": (rests, max(0, starting - rests)),
        "sample": (rests, max(0, sampling)),
        "score": (rests, returned + scoring),
        "update": updating,
        "hand-over": (rests, written + (bucket if worker.request.role.name == "actor" else 0)),
        "save": (rests, written),
    }


def _of(roles: DeviceRoles, worker: WorkerPlan) -> tuple[RunConfig, WorkerPlan, Sequence[WorkerPlan], Facts]:
    return roles.config, worker, roles.workers, roles.facts


def _resting_bytes(roles: DeviceRoles, worker: WorkerPlan) -> int:
    """Resident bytes of a rank that trains, between updates: no gradients; with `offload` nothing, or the weights if an
    embedded role computes with them."""
    engine, model = worker.request.engine, roles.facts.model_of(worker.request)
    held = held_bytes(worker, roles.facts)
    if engine is None or not engine.offload:
        if engine is not None and not is_whole(engine):
            return sharded_bytes(engine, model)["sample"]
        return held if engine is None else int(resting_share(engine) * held)
    hosts = any(other.request.embedded_in == worker.request.role for other in roles.workers)
    return min(held, _weight_bytes(engine, model)) if hosts else 0


def _weight_bytes(engine: EngineConfig, model: ModelFacts) -> int:
    """One rank's share of the weights."""
    return int(frozen_bytes_per_parameter(engine) * (model.parameters or 0))


def _check_device(roles: DeviceRoles, gpu: int, phases: Phases) -> None:
    """PlanError if a phase exceeds the device."""
    sizes, usable = bytes_by_phase(phases), roles.facts.usable_gpu_bytes or 0
    for part in (*_parts(roles).values(), ("start",)):
        phase = max(part, key=lambda name: sizes[name])
        if sizes[phase] > usable:
            raise _exceeded(roles, gpu, phase, phases[phase], sizes[phase])


def _exceeded(roles: DeviceRoles, gpu: int, phase: str, entries: Sequence[RoleBytes], size: int) -> PlanError:
    """The error for roles that exceed a device, with the settings that help."""
    serving = phase in PARTS[SERVING]
    word = "starting" if phase == "start" else SERVING if serving else TRAINING
    has = f"{size / GIB:.1f} GiB while {word}"
    if len(entries) == 1:
        (worker,) = (worker for worker in roles.workers if worker.request.role.name == entries[0].role)
        needs = f"role '{entries[0].role}' needs about {has} on device {gpu}"
        return too_large(f"{needs}, a device has {roles.facts.usable_gpu_text}", *_of(roles, worker))
    parts = ", ".join(f"{entry.role} {(entry.held + entry.working) / GIB:.1f}" for entry in entries)
    rests = ", or set actor.offload=true" if serving and roles.colocated_roles and _may_offload(roles.workers) else ""
    text = (
        f"memory: device {gpu} needs about {has} ({parts} GiB), it has {roles.facts.usable_gpu_text}; give the roles "
        f"separate pools{_lower(roles.workers, entries)}{rests}"
    )
    return DeviceMemoryError(text, f"{text}, or choose {SHARDS}")


def _parts(roles: DeviceRoles) -> Mapping[str, tuple[str, ...]]:
    """The phases of each part of a step; one part if no role sleeps."""
    return PARTS if roles.colocated_roles else {TRAINING: ("update", *PARTS[SERVING], "score")}


def _lower(workers: Sequence[WorkerPlan], entries: Sequence[RoleBytes]) -> str:
    """The part of an error that advises lower device shares."""
    names = {entry.role for entry in entries if entry.held}
    servers = [plan.request for plan in workers if plan.request.device_frac and plan.request.role.name in names]
    return f", lower what {' and '.join(server.role.name for server in servers)} reserve" if servers else ""


def _may_offload(workers: Sequence[WorkerPlan]) -> bool:
    """True if `actor.offload` can still be set."""
    engines = [plan.request.engine for plan in workers if plan.request.role == ACTOR]
    return any(engine and not engine.offload for engine in engines)
