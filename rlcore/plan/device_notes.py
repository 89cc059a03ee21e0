"""The devices of a plan: errors, compute threads, and notes on devices that are idle or in use."""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from rlcore.config import RunConfig
from rlcore.config.choices import DEVICE, Choice
from rlcore.contracts.clusters import ClusterAbilities, PoolPlan, WorkerPlan
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
    """The workers with their compute threads, and a description of the choice; on GPUs processes share the cores.

    Nothing changes on a CPU, if `cluster.threads` is set, or if workers run on machines that are unknown here.
    """
    if config.cluster.device != "cuda" or config.cluster.threads or abilities.elsewhere:
        return tuple(workers), ()
    num_processes = sum(
        plan.request.replicas * plan.request.ranks * max(1, ceil(plan.request.gpus))
        for plan in workers
        if plan.request.embedded_in is None
    )
    threads = max(1, facts.cpus // num_processes)
    reason = f"{facts.cpus} cores shared out among {num_processes} processes of workers"
    shared = (
        plan if plan.request.threads else replace(plan, request=replace(plan.request, threads=threads))
        for plan in workers
    )
    return tuple(shared), (Choice("cluster.threads", threads, reason),)


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
