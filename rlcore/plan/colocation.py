"""Roles that take turns with the actor on its devices, and the memory of every device in each phase."""

from collections.abc import Mapping, Sequence
from math import ceil

from rlcore.contracts.clusters import PoolPlan, WorkerPlan
from rlcore.errors import PlanError
from rlcore.errors.checks.interfaces import defines
from rlcore.plan.machine_facts import Facts
from rlcore.plan.memory import (
    CONTEXT_BYTES,
    frozen_bytes_per_parameter,
    held_and_working_bytes,
    is_whole,
    resting_share,
)
from rlcore.plan.run_plan import SchedulePlan
from rlcore.plan.sharded_memory import saving_bytes

ACTOR, ROLLOUT = "actor", "rollout"
SERVING, TRAINING = "serving", "training"
"""The phases of a step."""


AWAKE_FRAC = 0.9
"""Share of a device that the plan may fill with roles that train and serve there at the same time; the rest is left for
allocator fragmentation."""


def plan_colocation(
    pools: Sequence[PoolPlan],
    workers: Sequence[WorkerPlan],
    schedule: SchedulePlan,
    memory: Mapping[str, int],
    facts: Facts,
) -> tuple[str, ...]:
    """The roles that sleep while the actor trains: those that serve on its devices.

    These are the roles in the member pools of the actor's union, and those with GPUs in the actor's pool; without GPUs
    no roles share a device. Roles that compute in the passes of a step (reference, critic) take their turn there,
    awake. In the actor's pool, roles stay awake if the plan has room for all of them at the same time. PlanError for a
    role that cannot sleep, and for a schedule that would sample or score in the pools of a union while the actor
    trains; roles in the actor's pool are then awake, and have to fit next to it.
    """
    pool = actor_pool(pools, workers)
    if not pool.colocates and fits_awake(pools, workers, memory, facts):
        return ()
    found = []
    for plan in workers:
        if not shares_devices(plan, pool, workers):
            continue
        if not can_sleep(plan):
            request = plan.request
            where = f"union '{pool.name}' of {pool.provided_by}" if pool.colocates else "its own pool"
            raise PlanError(
                f"role '{request.role.name}' of {plan.asked_by} is in pool '{request.pool}', on whose devices the "
                f"actor trains ({where}), but {plan.cls.__qualname__} of "
                f"{plan.provided_by} has no sleep() and wake(); choose another backend, or a pool "
                f"{'outside of the union' if pool.colocates else 'separate from the actor'}"
            )
        found.append(plan.request.role.name)
    overlaps = schedule.stream or schedule.max_staleness
    if not pool.colocates:
        return () if overlaps else tuple(sorted(found))
    if found and overlaps:
        raise PlanError(
            f"pool '{pool.name}' of {pool.provided_by} is a union with {', '.join(pool.colocates)}: while the actor "
            f"trains {', '.join(sorted(found))} sleep, so nothing is sampled or scored meanwhile; needs "
            f"schedule.max_staleness=0 and schedule.stream_minibatches=false (found {schedule.max_staleness} and "
            f"{str(schedule.stream).lower()}), or separate pools"
        )
    return tuple(sorted(found))


def actor_pool(pools: Sequence[PoolPlan], workers: Sequence[WorkerPlan]) -> PoolPlan:
    """The pool that the actor trains in."""
    name = next(plan.request.pool for plan in workers if plan.request.role.name == ACTOR)
    return next(pool for pool in pools if pool.name == name)


def shares_devices(plan: WorkerPlan, pool: PoolPlan, workers: Sequence[WorkerPlan]) -> bool:
    """True if a role serves on the actor's devices while samples are generated and scored."""
    request = plan.request
    if request.embedded_in is not None or request.role.name == ACTOR:
        return False
    if request.pool in pool.colocates:
        return True
    trains_on_gpus = any(worker.request.gpus for worker in workers if worker.request.role.name == ACTOR)
    return serves(plan) and request.pool == pool.name and request.gpus > 0 and trains_on_gpus


def serves(plan: WorkerPlan) -> bool:
    """True if a role works in a separate process while samples are generated and scored.

    Of the roles of the core and the critic, only the rollout is called outside the passes of a step.
    """
    request = plan.request
    called = request.role.name == ROLLOUT or plan.asked_by.startswith(("agent ", "reward "))
    return called and request.embedded_in is None


def fits_awake(
    pools: Sequence[PoolPlan], workers: Sequence[WorkerPlan], memory: Mapping[str, int], facts: Facts
) -> bool:
    """True if all roles of the actor's pool fit on its devices at the same time; False if that is unknown."""
    pool = actor_pool(pools, workers)
    here = [plan.request for plan in workers if plan.request.pool == pool.name and plan.request.embedded_in is None]
    known = all(
        request.device_frac or (memory.get(request.role.name) and facts.model_of(request).shape)
        for request in here
        if request.gpus
    )
    if facts.gpu_memory_bytes is None or facts.usable_gpu_bytes is None or not known:
        return False
    devices = _on_devices(pools, workers, (), memory, facts, facts.gpu_memory_bytes)
    room = AWAKE_FRAC * facts.usable_gpu_bytes
    return all(_total(devices[gpu][TRAINING]) <= room for gpu in pool.gpus if gpu in devices)


def can_sleep(plan: WorkerPlan) -> bool:
    """True if the class of a role overrides `sleep` and `wake`."""
    return defines(plan.cls, plan.request.role.interface, "sleep", "wake")


def memory_of_devices(
    pools: Sequence[PoolPlan],
    workers: Sequence[WorkerPlan],
    colocated_roles: Sequence[str],
    memory: Mapping[str, int],
    facts: Facts,
) -> dict[str, dict[str, int]]:
    """Bytes that the fullest device of each pool holds in each phase; empty without GPUs of known size.

    Counts weights and optimizer state of every role on a device, or the share that it reserves; activations of one role
    at a time; and the CUDA context of each process. A sleeping role holds only `asleep_bytes`. A role with `offload`
    holds little while servers serve, and either activations or optimizer state while it trains. PlanError when that
    exceeds a device. Unknown roles are left out, as in `memory_estimate`.
    """
    if facts.gpu_memory_bytes is None:
        return {}
    devices = _on_devices(pools, workers, colocated_roles, memory, facts, facts.gpu_memory_bytes)
    _check_devices(devices, facts, workers)
    return {
        pool.name: {
            phase: max(_total(devices[gpu].get(phase, [])) for gpu in pool.gpus if gpu in devices)
            for phase in _phases(colocated_roles)
        }
        for pool in pools
        if any(gpu in devices for gpu in pool.gpus)
    }


def _phases(colocated_roles: Sequence[str]) -> tuple[str, ...]:
    return (SERVING, TRAINING) if colocated_roles else (TRAINING,)


def _on_devices(
    pools: Sequence[PoolPlan],
    workers: Sequence[WorkerPlan],
    colocated_roles: Sequence[str],
    memory: Mapping[str, int],
    facts: Facts,
    of_device: int,
) -> dict[int, dict[str, list[tuple[str, int, int]]]]:
    """(role, resident bytes, further bytes while it works) of every role on each device in each phase."""
    by_name = {pool.name: pool for pool in pools}
    devices: dict[int, dict[str, list[tuple[str, int, int]]]] = {}
    for plan in workers:
        if plan.request.embedded_in is not None or not plan.request.gpus:
            continue
        name = plan.request.role.name
        held, working = bytes_of(plan, memory, facts, of_device)
        resting, engine = resting_bytes(plan, workers, held, facts), plan.request.engine
        shards = engine is not None and not is_whole(engine)
        saved = saving_bytes(engine, facts.model_of(plan.request)) if engine and shards else 0
        for gpu in devices_of_ranks(plan, by_name[plan.request.pool]):
            for phase in _phases(colocated_roles):
                asleep = name in colocated_roles and phase == TRAINING
                idle = phase == SERVING and name not in colocated_roles
                kept = CONTEXT_BYTES + (plan.request.asleep_bytes if asleep else resting if idle else held)
                entry = (name, kept, 0 if asleep else saved if idle else working)
                devices.setdefault(gpu, {}).setdefault(phase, []).append(entry)
    return devices


def devices_of_ranks(plan: WorkerPlan, pool: PoolPlan) -> list[int]:
    """The device of every rank, as assigned by `rlcore.cluster.worker_context.devices_of`; repeated if it has several
    ranks."""
    request = plan.request
    size = ceil(request.gpus)
    num = request.replicas * request.ranks * size
    return [pool.gpus[index % len(pool.gpus)] for index in range(num)]


def bytes_of(plan: WorkerPlan, memory: Mapping[str, int], facts: Facts, of_device: int) -> tuple[int, int]:
    """(resident bytes of a rank during its phase, further bytes while it works), without its CUDA context."""
    request = plan.request
    if request.device_frac:
        return int(request.device_frac * of_device), 0
    return held_and_working_bytes(plan, memory.get(request.role.name, 0), facts)


def resting_bytes(plan: WorkerPlan, workers: Sequence[WorkerPlan], held: int, facts: Facts) -> int:
    """Resident bytes of a training rank while servers serve: no gradients; with `offload` nothing, or the weights for
    an embedded role.

    Several roles load theirs to the device around the updates of a step, so all of them count in that phase.
    """
    request, engine = plan.request, plan.request.engine
    if engine is None:
        return held
    if not engine.offload:
        return int(resting_share(engine) * held)
    hosts = any(worker.request.embedded_in == request.role for worker in workers)
    weights = int(frozen_bytes_per_parameter(engine) * (facts.model_of(request).parameters or 0))
    return min(held, weights) if hosts else 0


def _total(entries: Sequence[tuple[str, int, int]]) -> int:
    return sum(held for _, held, _ in entries) + max((working for _, _, working in entries), default=0)


def _lower(workers: Sequence[WorkerPlan], entries: Sequence[tuple[str, int, int]]) -> str:
    """The part of an error that advises lower device shares."""
    names = {name for name, held, _ in entries if held}
    roles = [plan.request for plan in workers if plan.request.device_frac and plan.request.role.name in names]
    return f", lower what {' and '.join(role.role.name for role in roles)} reserve" if roles else ""


def _may_offload(workers: Sequence[WorkerPlan]) -> bool:
    """True if `actor.offload` can still be set."""
    engines = [plan.request.engine for plan in workers if plan.request.role.name == ACTOR]
    return any(engine and not engine.offload for engine in engines)


def _check_devices(
    devices: Mapping[int, Mapping[str, Sequence[tuple[str, int, int]]]], facts: Facts, workers: Sequence[WorkerPlan]
) -> None:
    size = facts.usable_gpu_bytes or 0
    for gpu, phases in sorted(devices.items()):
        for phase, entries in phases.items():
            total = _total(entries)
            if total > size and len(entries) > 1:  # `check_memory` covers a role alone
                parts = ", ".join(f"{name} {(held + working) / 2**30:.1f}" for name, held, working in entries)
                rests = ", or set actor.offload=true" if phase == SERVING and _may_offload(workers) else ""
                raise PlanError(
                    f"memory: device {gpu} needs about {total / 2**30:.1f} GiB while {phase} ({parts} GiB), it has "
                    f"{facts.usable_gpu_text}; give the roles separate pools{_lower(workers, entries)}{rests}"
                )
