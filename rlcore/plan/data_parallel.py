"""Checks that every rank of a data-parallel role has work."""

from collections.abc import Mapping, Sequence

from rlcore.contracts.clusters import WorkerPlan
from rlcore.errors import PlanError, counted
from rlcore.plan.planner_input import CORE
from rlcore.types import SharedPrefix


def check_ranks(workers: Sequence[WorkerPlan], arithmetic: Mapping[str, int]) -> None:
    """PlanError for a rank without work in a mini-batch, and for settings that do not support sharded weights."""
    sharded = set()
    for plan in workers:
        request, engine = plan.request, plan.request.engine
        if engine is None or request.embedded_in is not None or request.ranks == 1:
            continue
        if request.trains:
            _check_shares(plan, arithmetic)
        if engine.sharding != "none":
            sharded.add(request.role.name)
    for plan in workers:
        host = plan.request.embedded_in
        if host is not None and host.name in sharded and plan.asked_by != CORE:
            raise PlanError(
                f"role '{plan.request.role.name}' of {plan.asked_by} is served inside '{host.name}', each of whose "
                f"ranks has a part of the weights only; set {host.name}.sharding=none, or give the role a process of "
                "its own"
            )


def _check_shares(plan: WorkerPlan, arithmetic: Mapping[str, int]) -> None:
    role, size = plan.request.role.name, plan.request.engine.context_parallel if plan.request.engine else 1
    ranks, of = plan.request.ranks // size, "" if size == 1 else f" of {size} ranks"
    each = "rank" if size == 1 else "group"
    settings = plan.request.settings or role
    together = plan.shared_prefix is not SharedPrefix.NONE
    shares = arithmetic["minibatch_prompts" if together else "minibatch_samples"]
    if ranks > shares:
        found = counted(shares, "group" if together else "sample")
        found += ", whose samples share the computation of their prompt" if together else ""
        raise PlanError(
            f"role '{role}': {counted(ranks, each)}{of}, and a mini-batch has {found}; needs at most "
            f"{counted(shares, each)}{of}, or more prompts "
            "per mini-batch (train.prompts_per_step, actor.minibatch_prompts)"
            + (f", or {settings}.shared_prefix=none" if together else "")
        )
