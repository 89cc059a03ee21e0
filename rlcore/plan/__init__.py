"""The planner: components state what they need, plugins offer, the configuration names, `make_plan` decides."""

from rlcore.contracts.clusters import PoolPlan, WorkerPlan
from rlcore.plan.machine_facts import Facts
from rlcore.plan.planner import make_plan
from rlcore.plan.planner_input import CORE, Offers
from rlcore.plan.run_plan import AlgorithmPlan, ComponentPlan, OldLogprobs, RunPlan, SchedulePlan, TrackerPlan
from rlcore.plan.show import plan_to_json

__all__ = [
    "CORE",
    "AlgorithmPlan",
    "ComponentPlan",
    "Facts",
    "Offers",
    "OldLogprobs",
    "PoolPlan",
    "RunPlan",
    "SchedulePlan",
    "TrackerPlan",
    "WorkerPlan",
    "make_plan",
    "plan_to_json",
]
