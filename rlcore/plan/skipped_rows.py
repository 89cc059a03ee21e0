"""Decides whether updates skip rows that add nothing to the gradient: rows whose advantages are all 0."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rlcore.config import RunConfig
from rlcore.contracts.actor import ACTOR
from rlcore.contracts.clusters import WorkerPlan
from rlcore.plan.run_plan import AlgorithmPlan


def why_all_rows(config: RunConfig, algorithms: Mapping[str, AlgorithmPlan]) -> str:
    """The part of the loss that may give these rows a gradient, so that all rows are computed; empty if there is
    none."""
    if config.algo.kl.placement == "loss":
        return "algo.kl.placement=loss gives each token a gradient"
    if config.algo.entropy_coef:
        return f"algo.entropy_coef={config.algo.entropy_coef:g} gives each token a gradient"
    plan = algorithms["policy_loss"]
    if not plan.algorithm.ignores_zero_advantages:
        return f"algo.policy_loss={plan.algorithm.name} of {plan.provided_by} may give them a gradient"
    return ""


def skip_rows(workers: Sequence[WorkerPlan], skips: bool) -> tuple[WorkerPlan, ...]:
    """The workers, with the actor set to skip these rows or not."""
    return tuple(replace(plan, skips_rows=skips) if plan.request.role == ACTOR else plan for plan in workers)
