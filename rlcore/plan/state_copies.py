"""Checkpoints: whether the host holds a copy of what is trained, so that training goes on while it is written."""

from dataclasses import replace

from rlcore.contracts.clusters import WorkerPlan
from rlcore.plan.activations import BYTES
from rlcore.plan.run_plan import RunPlan
from rlcore.plan.sharded_memory import MOMENT_BYTES, host_bytes

FILLED = 0.9
"""Share of the host's memory that a run may fill with a copy in it."""


def plan_saving(plan: RunPlan) -> RunPlan:
    """The plan with copies where the host holds them; a note says why where it does not.

    Of machines elsewhere the memory is not known, as for all checks of it.
    """
    others, copies = _others_bytes(plan), copied_bytes(plan)
    size = plan.facts.memory_bytes
    if size is None or plan.cluster.abilities.elsewhere or others + copies <= FILLED * size:
        return plan
    note = (
        f"checkpoints: training waits while they are written: a copy of weights and optimizer state takes about "
        f"{_gib(copies)} GiB, the run {_gib(others)} GiB of the host's {_gib(size)} GiB"
    )
    return replace(plan, saves_copies=False, notes=(*plan.notes, note))


def copied_bytes(plan: RunPlan) -> int:
    """Bytes of host memory that hold a copy of all models that are trained; adapters are small."""
    return sum(_copied_bytes(plan, worker) for worker in plan.workers)


def _copied_bytes(plan: RunPlan, worker: WorkerPlan) -> int:
    request, engine = worker.request, worker.request.engine
    if engine is None or engine.lora.enabled or request.embedded_in is not None:
        return 0
    return int((BYTES[engine.dtype] + MOMENT_BYTES[engine.dtype]) * (plan.facts.model_of(request).parameters or 0))


def _others_bytes(plan: RunPlan) -> int:
    """Bytes of host memory that the run needs beside that copy."""
    total = 0
    for worker in plan.workers:
        request = worker.request
        if request.gpus:
            total += sum(size for purpose, size in host_bytes(plan, worker).items() if purpose != "save")
        else:
            total += plan.memory_bytes.get(request.role.name, 0) * request.replicas * request.ranks
    return total


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f}"
