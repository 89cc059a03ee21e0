"""Checks the host memory of a run on GPUs, and decides whether it fits a copy of the trained state, so that training
continues while a checkpoint is written."""

from dataclasses import replace

from rlcore.contracts.clusters import WorkerPlan
from rlcore.errors import PlanError
from rlcore.plan.activations import BYTES
from rlcore.plan.machine_facts import in_gib
from rlcore.plan.run_plan import RunPlan
from rlcore.plan.sharded_memory import MOMENT_BYTES, host_bytes
from rlcore.plan.weight_sync import is_chosen, takes_files
from rlcore.types import SENT_KINDS

FILLED = 0.9
"""Share of the host's memory that a run may fill, the copy included."""


def plan_saving(plan: RunPlan) -> RunPlan:
    """The plan with copies if they fit into host memory, else with a note that says why not. If copies, or the whole
    run, fit only without weights in shared memory that the planner chose, weights go through files.

    PlanError if the host does not hold even what the run needs without copies. The memory of other machines is not
    known, as in all memory checks.
    """
    others, copies = _others_bytes(plan), copied_bytes(plan)
    size = plan.facts.memory_bytes
    if size is None or plan.cluster.abilities.elsewhere or others + copies <= FILLED * size:
        return plan
    if plan.weight_sync == "shm" and is_chosen(plan.config) and takes_files(plan):
        by_files = replace(plan, weights_kind="directory")
        if others > size or _others_bytes(by_files) + copies <= FILLED * size:
            return plan_saving(by_files)
    if others > size:
        raise PlanError(_exceeded(plan, others, size))
    note = (
        f"checkpoints: training waits while they are written: a copy of weights and optimizer state takes about "
        f"{in_gib(copies)} GiB, the run {in_gib(others)} GiB of the host's {in_gib(size)} GiB"
    )
    return replace(plan, saves_copies=False, notes=(*plan.notes, note))


def _exceeded(plan: RunPlan, needed: int, of_host: int) -> str:
    """The host memory of each role, with the settings that lower it."""
    parts, ways = [], []
    for worker in plan.workers:
        name, found, engine = worker.request.role.name, host_bytes(plan, worker), worker.request.engine
        if not worker.request.gpus and name in plan.memory_bytes:
            parts.append(f"{name} {in_gib(plan.memory_bytes[name] * worker.request.replicas * worker.request.ranks)}")
        parts += [
            f"{name} {in_gib(found[purpose])} for {purpose}" for purpose in ("offload", "hand-over") if purpose in found
        ]
        where = worker.request.settings or name
        if engine and "offload" in found:
            ways += [f"{where}.offload=false"]
            ways += [f"{where}.sharding=fsdp2"] if engine.shard_ranks == 1 < worker.request.ranks else []
    by_files = replace(plan, weights_kind="directory")
    if plan.weights_kind in SENT_KINDS and takes_files(plan) and _others_bytes(by_files) < needed:
        ways += ["rollout.weight_sync=disk"]
    advice = f"set {' or '.join(ways)}, or take a smaller model" if ways else "take a smaller model"
    return (
        f"memory: the run needs about {in_gib(needed)} GiB of host memory ({', '.join(parts)}), the machine has "
        f"{in_gib(of_host)}; {advice}"
    )


def copied_bytes(plan: RunPlan) -> int:
    """Host memory in bytes for a copy of all trained models; adapters are small and not counted."""
    return sum(_copied_bytes(plan, worker) for worker in plan.workers)


def _copied_bytes(plan: RunPlan, worker: WorkerPlan) -> int:
    request, engine = worker.request, worker.request.engine
    if engine is None or not request.trains or engine.lora.enabled or request.embedded_in is not None:
        return 0
    return int((BYTES[engine.dtype] + MOMENT_BYTES[engine.dtype]) * (plan.facts.model_of(request).parameters or 0))


def _others_bytes(plan: RunPlan) -> int:
    """Host memory in bytes that the run needs in addition to that copy."""
    total = 0
    for worker in plan.workers:
        request = worker.request
        total += sum(size for purpose, size in host_bytes(plan, worker).items() if purpose != "save")
        if not request.gpus:
            total += plan.memory_bytes.get(request.role.name, 0) * request.replicas * request.ranks
    return total
