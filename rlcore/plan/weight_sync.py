"""Plans the weight sync from the actor to the rollout."""

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from rlcore.config import RunConfig
from rlcore.config.choices import Choice
from rlcore.contracts.clusters import PoolPlan, WorkerPlan
from rlcore.errors import PlanError
from rlcore.errors.checks.interfaces import defines
from rlcore.plan.colocation import ACTOR, actor_pool, shares_devices
from rlcore.plan.device_memory import devices_of_ranks
from rlcore.plan.run_plan import RunPlan, WeightsKind


def plan_weights(
    config: RunConfig, workers: Sequence[WorkerPlan], pools: Sequence[PoolPlan], *, elsewhere: bool
) -> WeightsKind:
    """The kind of weight sync from the actor to the rollout; '' when the rollout is embedded in the actor.

    PlanError if the rollout does not support the kind that the settings ask for. `elsewhere`: workers run on machines
    that the planner cannot see, or on several.
    """
    rollout = _rollout_of(workers)
    inside = rollout.request.embedded_in
    by = config.rollout.weight_sync
    if by == "auto":
        by = "shm"
        if inside is not None or _why_not_shm(config, rollout, elsewhere=elsewhere):
            by = _otherwise(rollout)
    who = f"{rollout.cls.__qualname__} of {rollout.provided_by}"
    if inside is not None:
        if by != "disk":
            raise PlanError(
                f"rollout.weight_sync={by}: the rollout is served inside '{inside.name}' and has no copy of the "
                "weights; leave it out, or choose a rollout.backend that has one"
            )
        return ""
    actor = next(plan for plan in workers if plan.request.role.name == ACTOR)
    methods = [(actor, "weights"), (rollout, "load_weights"), *([(actor, "send_weights")] if by == "ipc" else [])]
    for plan, method in methods:
        if not defines(plan.cls, plan.request.role.interface, method):
            raise PlanError(
                f"rollout.backend={rollout.request.backend}: the rollout has a copy of the weights, and "
                f"{plan.cls.__qualname__} of {plan.provided_by} defines no {method}(); needs one, or a rollout that is "
                "served inside the actor"
            )
    if by not in rollout.weight_sync:
        raise PlanError(
            f"rollout.weight_sync={config.rollout.weight_sync}: {who} does not take weights that way (its offer's "
            f"weight_sync); choose from: "
            f"{', '.join(sorted(rollout.weight_sync)) or 'another rollout.backend'}"
        )
    if by == "shm" and elsewhere:
        raise PlanError(
            f"rollout.weight_sync=shm shares memory of one machine, and cluster.backend={config.cluster.backend} may "
            "put the actor and replicas of the rollout on several; choose tcp or disk"
        )
    if by == "nccl" and config.rollout.weights_transport == "nccl":
        _check_nccl(config, rollout, workers, pools)
    if by == "ipc":
        _check_ipc(config, rollout, workers, pools)
    if rollout.request.takes_adapter and by != "disk":
        raise PlanError(
            f"rollout.weight_sync={by} sends whole weights, and {who} takes an adapter alone, which is handed over as "
            "files; choose rollout.weight_sync=disk, or another rollout.backend"
        )
    if rollout.request.takes_adapter:
        return "adapter"
    return "directory" if by == "disk" else by


def is_chosen(config: RunConfig) -> bool:
    """True if the planner chooses the way of weight sync."""
    return config.rollout.weight_sync == "auto"


def takes_files(plan: RunPlan) -> bool:
    """True if the rollout takes weights from files."""
    return "disk" in _rollout_of(plan.workers).weight_sync


def expected_sync(config: RunConfig) -> str:
    """The fastest way of weight sync that the plan may choose, without knowing the workers."""
    return "shm" if is_chosen(config) else config.rollout.weight_sync


def with_choice(plan: RunPlan) -> RunPlan:
    """The plan with its way of weight sync and the reason, if `rollout.weight_sync` leaves that to the plan."""
    if not is_chosen(plan.config) or not plan.weights_kind:
        return plan
    rollout = _rollout_of(plan.workers)
    reason = "actor and replicas are on one machine, and all of them read one copy in its memory"
    if plan.weight_sync != "shm":
        elsewhere = plan.cluster.abilities.elsewhere or plan.facts.several_nodes
        why = _why_not_shm(plan.config, rollout, elsewhere=elsewhere)
        reason = why or "the host has no memory for another copy of the weights"
    return replace(plan, choices=(*plan.choices, Choice("rollout.weight_sync", plan.weight_sync, reason)))


def _otherwise(rollout: WorkerPlan) -> Literal["disk", "tcp", "nccl"]:
    """The way of weights that cannot go through shared memory: files, unless the rollout takes only another way."""
    taken = rollout.weight_sync
    if rollout.request.embedded_in is not None or "disk" in taken:
        return "disk"
    return "tcp" if "tcp" in taken else "nccl" if "nccl" in taken else "disk"


def _why_not_shm(config: RunConfig, rollout: WorkerPlan, *, elsewhere: bool) -> str:
    """Reason why weights cannot go through shared memory; empty: they can."""
    if config.rollout.weights_dir:
        return "rollout.weights_dir is set"
    if rollout.request.takes_adapter:
        return "an adapter is handed over as files"
    if elsewhere:
        return "actor and replicas may be on several machines"
    if "shm" not in rollout.weight_sync or not hasattr(os, "memfd_create"):
        return f"{rollout.cls.__qualname__} of {rollout.provided_by} does not take weights from shared memory here"
    return ""


def _rollout_of(workers: Sequence[WorkerPlan]) -> WorkerPlan:
    return next(plan for plan in workers if plan.request.role.name == "rollout")


def _check_nccl(
    config: RunConfig, rollout: WorkerPlan, workers: Sequence[WorkerPlan], pools: Sequence[PoolPlan]
) -> None:
    """PlanError unless actor and rollout have separate CUDA devices."""
    if config.cluster.device != "cuda":
        raise PlanError(
            f"rollout.weight_sync=nccl broadcasts between CUDA devices, and cluster.device={config.cluster.device}; "
            "choose tcp, shm or disk, or rollout.weights_transport=gloo, which broadcasts between hosts"
        )
    if shares_devices(rollout, actor_pool(pools, workers), workers):
        raise PlanError(
            "rollout.weight_sync=nccl cannot connect two processes on one device, and the rollout is on devices that "
            "the actor trains on; choose shm, tcp or disk, or cluster.layout=split"
        )


def _check_ipc(
    config: RunConfig, rollout: WorkerPlan, workers: Sequence[WorkerPlan], pools: Sequence[PoolPlan]
) -> None:
    """PlanError unless a rank of the actor is on each device of the rollout and has its weights while it serves."""
    way, others = "rollout.weight_sync=ipc", "choose shm, tcp or disk"
    pool, schedule = actor_pool(pools, workers), config.schedule
    if not shares_devices(rollout, pool, workers):
        colocated = ", or cluster.layout=colocated" if rollout.request.gpus else ""  # unused without GPUs
        raise PlanError(
            f"{way} is for replicas on the devices that the actor trains on, and the rollout is in pool "
            f"'{rollout.request.pool}'; {others}{colocated}"
        )
    if schedule.max_staleness or schedule.stream_minibatches:
        raise PlanError(
            f"{way}: a restarted replica gets its version from the actor, whose weights would change meanwhile; needs "
            f"schedule.max_staleness=0 and schedule.stream_minibatches=false (found {schedule.max_staleness} and "
            f"{str(schedule.stream_minibatches).lower()}); or {others}"
        )
    actor = next(plan for plan in workers if plan.request.role.name == ACTOR)
    its_pool = next(plan for plan in pools if plan.name == rollout.request.pool)
    if pool.gpus and its_pool.gpus:
        without = sorted({*devices_of_ranks(rollout, its_pool)} - {*devices_of_ranks(actor, pool)})
        if without:
            raise PlanError(
                f"{way}: the rollout has devices {', '.join(map(str, without))}, on which no rank of the actor is; "
                f"{others}, or more ranks with actor.data_parallel"
            )
