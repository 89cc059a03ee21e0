"""Refuses runs that would learn nothing because the estimator `none` gives no advantages."""

from collections.abc import Mapping

from rlcore.config import RunConfig
from rlcore.errors import ConfigError, PlanError
from rlcore.plan.run_plan import AlgorithmPlan
from rlcore.plan.skipped_rows import why_all_rows

NO_ADVANTAGE = "none"
"""The core's estimator whose advantages are 0."""


def check_distillation(config: RunConfig, algorithms: Mapping[str, AlgorithmPlan]) -> None:
    """ConfigError or PlanError if nothing is learned, or if groups would be replaced that teach by their KL term."""
    in_advantage = config.algo.kl.placement == "advantage"
    if in_advantage and config.algo.dynamic_sampling:
        raise PlanError(
            "algo.dynamic_sampling=true replaces groups whose rewards are all equal, but algo.kl.placement=advantage "
            "teaches with them, too; choose algo.dynamic_sampling=false"
        )
    if config.algo.advantage != NO_ADVANTAGE:
        return
    if not in_advantage and not why_all_rows(config, algorithms):
        raise ConfigError(
            "algo.advantage=none: its advantages are 0, so nothing is learned; choose an estimator such as grpo, or "
            "algo.preset=distillation with reference.path=TEACHER"
        )
    if in_advantage and not config.has_other_reference:
        raise ConfigError(
            f"reference.path={config.reference.path or 'empty'}: the teacher is the policy's starting point, from "
            "which algo.advantage=none learns nothing; needs the directory or hub name of another model"
        )
