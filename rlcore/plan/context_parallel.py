"""Checks roles whose ranks hold slices of each sequence: ranks, class, model and attention."""

from collections.abc import Sequence

from rlcore.contracts.clusters import WorkerPlan
from rlcore.errors import PlanError
from rlcore.plan.machine_facts import Facts
from rlcore.types import SharedPrefix


def check_context(workers: Sequence[WorkerPlan], facts: Facts, unshared: Sequence[str]) -> None:
    """PlanError if `context_parallel` does not divide ranks or heads, or if class or attention do not support it.

    `unshared`: the notes of `plan_shared_prefixes`, which say why a role does not share prompts.
    """
    sizes = {plan.request.role.name: _size(plan) for plan in workers}
    for plan in workers:
        host = plan.request.embedded_in
        if host is not None and plan.request.engine is not None and _size(plan) != sizes[host.name]:
            raise PlanError(
                f"role '{plan.request.role.name}' of {plan.asked_by} trains inside '{host.name}', whose ranks hold "
                f"slices of each sequence; set {host.name}.context_parallel=1, or give the role a separate process"
            )
        if _size(plan) > 1:
            _check(plan, facts, unshared)


def _size(plan: WorkerPlan) -> int:
    return 1 if plan.request.engine is None else plan.request.engine.context_parallel


def _check(plan: WorkerPlan, facts: Facts, unshared: Sequence[str]) -> None:
    role, ranks, size = plan.request.role.name, plan.request.ranks, _size(plan)
    settings = plan.request.settings or role
    who, otherwise = f"role '{role}': {settings}.context_parallel={size}", f"{settings}.context_parallel=1"
    if not plan.context_parallel:
        raise PlanError(f"{who}: {plan.offered_by} does not compute sequences in slices; needs {otherwise}")
    if ranks % size:
        raise PlanError(
            f"{who}: {settings}.data_parallel={ranks}; needs a context_parallel that divides it, or "
            f"{settings}.data_parallel={-(-ranks // size) * size}"
        )
    shape = facts.model_of(plan.request).shape
    if shape is not None and shape.heads % size:
        raise PlanError(f"{who}: its model has {shape.heads} heads of attention; needs a number that divides them")
    if plan.shared_prefix is not SharedPrefix.TREE:
        reason = next((note.partition(", because ")[2] for note in unshared if note.startswith(f"{role}: ")), "")
        found = f"shared_prefix is {plan.shared_prefix}" + (f", because {reason}" if reason else "")
        raise PlanError(f"{who}: slices need the attention of shared_prefix=tree, and {found}; choose {otherwise}")
