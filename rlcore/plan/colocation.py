"""Roles that take turns with the actor on its devices."""

from collections.abc import Mapping, Sequence

from rlcore.config import RunConfig
from rlcore.contracts.clusters import PoolPlan, WorkerPlan
from rlcore.errors import PlanError
from rlcore.errors.checks.interfaces import defines
from rlcore.plan.device_memory import DeviceRoles, bytes_by_phase, phases_of_devices, serves
from rlcore.plan.machine_facts import Facts
from rlcore.plan.run_plan import SchedulePlan
from rlcore.plan.shared_device import AWAKE_FRAC

ACTOR, ROLLOUT = "actor", "rollout"


def plan_colocation(
    config: RunConfig,
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
    if not pool.colocates and fits_awake(config, pools, workers, memory, facts):
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


def roles_on_actors_devices(pools: Sequence[PoolPlan], workers: Sequence[WorkerPlan]) -> list[str]:
    """The roles that serve on the actor's devices, whether they sleep while it trains or not."""
    pool = actor_pool(pools, workers)
    return [plan.request.role.name for plan in workers if shares_devices(plan, pool, workers)]


def shares_devices(plan: WorkerPlan, pool: PoolPlan, workers: Sequence[WorkerPlan]) -> bool:
    """True if a role serves on the actor's devices while samples are generated and scored."""
    request = plan.request
    if request.embedded_in is not None or request.role.name == ACTOR:
        return False
    if request.pool in pool.colocates:
        return True
    trains_on_gpus = any(worker.request.gpus for worker in workers if worker.request.role.name == ACTOR)
    return serves(plan) and request.pool == pool.name and request.gpus > 0 and trains_on_gpus


def fits_awake(
    config: RunConfig,
    pools: Sequence[PoolPlan],
    workers: Sequence[WorkerPlan],
    memory: Mapping[str, int],
    facts: Facts,
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
    devices = phases_of_devices(DeviceRoles(config, pools, workers, (), memory, facts))
    room = AWAKE_FRAC * facts.usable_gpu_bytes
    return all(max(bytes_by_phase(devices[gpu]).values()) <= room for gpu in pool.gpus if gpu in devices)


def can_sleep(plan: WorkerPlan) -> bool:
    """True if the class of a role overrides `sleep` and `wake`."""
    return defines(plan.cls, plan.request.role.interface, "sleep", "wake")
