"""The devices of a plan: errors, compute threads, and notes on devices that are idle or in use."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import Any

from rlcore.config import RunConfig
from rlcore.config.choices import DEVICE, Choice
from rlcore.contracts.clusters import ClusterAbilities, PoolPlan, WorkerPlan
from rlcore.contracts.requests import Role, WorkerRequest
from rlcore.contracts.rollout import ROLLOUT
from rlcore.errors import PlanError, counted
from rlcore.plan.device_memory import serves
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

    On GPUs all processes share the cores. On a CPU those of a phase do (`_phases`): with more threads than cores, each
    waits for others that do not run.

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
        free = [[request for request in phase if not request.threads] for phase in _phases(config, workers)]
        sharing = _most_at_once(phase for phase in free if _num_processes(phase) > 1)
        among = _names([request for request in hosts if request.role in sharing])
    if not sharing:
        return tuple(workers), ()
    threads = {role: max(1, facts.cpus // num) for role, num in sharing.items()}
    shared = tuple(_with_threads(plan, threads) for plan in workers)
    return shared, (Choice("cluster.threads", min(threads.values()), f"{facts.cpus} cores shared out among {among}"),)


def _phases(config: RunConfig, workers: Sequence[WorkerPlan]) -> list[list[WorkerRequest]]:
    """The roles that share a CPU's cores: those that sample and score, and each role of passes and updates by itself;
    all together if separate samplers work while the actor trains.

    An actor with the sampler in its process shares with no reward model, because its updates would have fewer threads,
    too.
    """
    hosts = [plan for plan in workers if plan.request.embedded_in is None]
    serving = [plan.request for plan in hosts if serves(plan)]
    others = [plan.request for plan in hosts if not serves(plan)]
    if config.schedule.max_staleness and any(request.role == ROLLOUT for request in serving):
        return [[*serving, request] for request in others]
    return [serving, *([request] for request in others)]


def _num_processes(phase: Sequence[WorkerRequest]) -> int:
    return sum(request.replicas * request.ranks for request in phase)


def _names(phase: Sequence[WorkerRequest]) -> str:
    return "the processes of " + ", ".join(f"{request.role.name} ({_num_processes([request])})" for request in phase)


def _most_at_once(phases: Iterable[Sequence[WorkerRequest]]) -> dict[Role[Any], int]:
    """By role, the processes of the largest phase that it is part of."""
    most: dict[Role[Any], int] = {}
    for phase in phases:
        for request in phase:
            most[request.role] = max(most.get(request.role, 0), _num_processes(phase))
    return most


def _with_threads(plan: WorkerPlan, threads: Mapping[Role[Any], int]) -> WorkerPlan:
    """The plan with the threads of its process; what its request sets stays."""
    request = plan.request
    found = threads.get(request.embedded_in or request.role, 0)
    return plan if request.threads or not found else replace(plan, request=replace(request, threads=found))


def thread_notes(
    config: RunConfig, workers: Sequence[WorkerPlan], facts: Facts, abilities: ClusterAbilities
) -> list[str]:
    """A note if processes that compute at the same time have more threads than a CPU has cores."""
    set_threads = config.cluster.threads
    if config.cluster.device == "cuda" or abilities.elsewhere or set_threads < 2:
        return []
    following = [
        [request for request in phase if request.threads in (0, set_threads)] for phase in _phases(config, workers)
    ]
    largest = max(following, key=_num_processes, default=[])
    threads = set_threads * _num_processes(largest)
    if threads == set_threads or threads <= facts.cpus:
        return []
    return [
        f"cluster.threads={set_threads}: {_names(largest)} have {threads} threads on {facts.cpus} cores, and a step "
        "takes several times as long; set it to 0"
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
    many = counted(facts.gpus, "GPU")
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
