"""The devices of a plan: errors, compute threads, and notes on devices that are idle or in use."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import Any

from rlcore.config import RunConfig
from rlcore.config.choices import DEVICE, Choice
from rlcore.contracts.clusters import ClusterAbilities, PoolPlan, WorkerPlan
from rlcore.contracts.requests import Role
from rlcore.errors import PlanError
from rlcore.plan.machine_facts import GIB, Facts

TAKEN_SHARE = 0.03
"""Share of a device that driver and display use; more than that is another process."""


def check_device(config: RunConfig, facts: Facts, abilities: ClusterAbilities) -> None:
    """PlanError when the run asks for GPUs that this process cannot compute on."""
    if config.cluster.device == "cuda" and facts.gpu_problem and not abilities.elsewhere:
        raise PlanError(
            f"cluster.device=cuda: {facts.gpu_problem}; needs a GPU that this process sees and a torch that is built "
            "for CUDA, or choose cluster.device=cpu"
        )


def share_threads(
    config: RunConfig, workers: Sequence[WorkerPlan], facts: Facts, abilities: ClusterAbilities
) -> tuple[tuple[WorkerPlan, ...], tuple[Choice, ...]]:
    """The workers with their compute threads, and a description of the choice.

    On GPUs all processes share the cores. On a CPU the ranks and replicas of a role do, because they compute at the
    same time: with more threads than cores, each waits for others that do not run. Roles compute in turn.

    Nothing changes if `cluster.threads` is set, or if workers run on machines that are unknown here.
    """
    if config.cluster.threads or abilities.elsewhere:
        return tuple(workers), ()
    hosts = [plan.request for plan in workers if plan.request.embedded_in is None]
    if config.cluster.device == "cuda":
        num = sum(request.replicas * request.ranks * max(1, ceil(request.gpus)) for request in hosts)
        sharing = dict.fromkeys((request.role for request in hosts), num)
        among = f"{num} processes of workers"
    else:
        free = {request.role: request.replicas * request.ranks for request in hosts if not request.threads}
        sharing = {role: num for role, num in free.items() if num > 1}
        among = "the processes of " + ", ".join(f"{role.name} ({num})" for role, num in sharing.items())
    if not sharing:
        return tuple(workers), ()
    threads = {role: max(1, facts.cpus // num) for role, num in sharing.items()}
    shared = tuple(_with_threads(plan, threads) for plan in workers)
    return shared, (Choice("cluster.threads", min(threads.values()), f"{facts.cpus} cores shared out among {among}"),)


def _with_threads(plan: WorkerPlan, threads: Mapping[Role[Any], int]) -> WorkerPlan:
    """The plan with the threads of its process; what its request sets stays."""
    request = plan.request
    found = threads.get(request.embedded_in or request.role, 0)
    return plan if request.threads or not found else replace(plan, request=replace(request, threads=found))


def thread_notes(
    config: RunConfig, workers: Sequence[WorkerPlan], facts: Facts, abilities: ClusterAbilities
) -> list[str]:
    """A note on each role whose ranks and replicas have more threads than a CPU has cores."""
    if config.cluster.device == "cuda" or abilities.elsewhere or not config.cluster.threads:
        return []
    return [
        f"cluster.threads={config.cluster.threads}: the {num} processes of {request.role.name} have {num * threads} "
        f"threads on {facts.cpus} cores, and a step takes several times as long; set it to 0"
        for request in (plan.request for plan in workers)
        if request.embedded_in is None
        and (num := request.replicas * request.ranks) > 1
        and num * (threads := request.threads or config.cluster.threads) > facts.cpus
    ]


def device_notes(
    config: RunConfig,
    facts: Facts,
    pools: Sequence[PoolPlan],
    choices: Sequence[Choice],
    abilities: ClusterAbilities,
) -> list[str]:
    """Notes on idle devices, and on device memory that other processes use."""
    if abilities.elsewhere:
        chosen = any(choice.key == DEVICE and not choice.set_by for choice in choices)
        looked = f"{DEVICE}=auto is {config.cluster.device}: it looks at this machine, and the workers run on others; "
        return [f"{looked}set {DEVICE}"] if chosen else []
    many = "1 GPU" if facts.gpus == 1 else f"{facts.gpus} GPUs"
    if config.cluster.device != "cuda":
        why = f" ({facts.gpu_problem})" if facts.gpu_problem else ""
        return [f"{DEVICE}=cpu: {many} of this machine lie idle{why}"] if facts.gpus else []
    notes = []
    used = len({gpu for pool in pools for gpu in pool.gpus})
    if used < facts.gpus:
        notes.append(
            f"{many}, {used} used: raise actor.data_parallel or rollout.replicas, give roles separate pools, or "
            "name the devices of this run in CUDA_VISIBLE_DEVICES"
        )
    total, free = facts.gpu_memory_bytes, facts.gpu_free_bytes
    if total and free is not None and total - free > TAKEN_SHARE * total:
        notes.append(
            f"{(total - free) / GIB:.1f} of the {total / GIB:.1f} GiB of a device are taken by other processes: the "
            f"plan counts with the {free / GIB:.1f} GiB that are free"
        )
    return notes
