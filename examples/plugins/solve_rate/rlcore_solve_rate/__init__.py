"""A curriculum by weight: groups that are solved half the time count most.

Prompts that are always or never solved teach nothing, and those that nearly are teach little. The order of prompts is
not changed, so a run stays reproducible and every prompt comes back when the policy is ready for it.
"""

from rlcore import Algorithm, AlgorithmKind, Scope, hookimpl


@hookimpl
def rlcore_algorithms() -> list[Algorithm]:
    return [Algorithm("solve_rate", AlgorithmKind.ADVANTAGE, "rlcore_solve_rate.estimator:solve_rate", Scope.GROUP)]
