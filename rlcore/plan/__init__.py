"""The planner: components state what they need, plugins offer, the configuration names, `make_plan` decides."""

from rlcore.plan.decided import AlgorithmPlan, ComponentPlan, OldLogprobs, PoolPlan, RunPlan, SchedulePlan, WorkerPlan
from rlcore.plan.facts import Facts, ModelFacts, ModelShape
from rlcore.plan.make import make_plan
from rlcore.plan.offers import CORE, Offers
from rlcore.plan.show import plan_to_json
from rlcore.plan.types import (
    Algorithm,
    AlgorithmKind,
    BuildContext,
    Component,
    ConfigSection,
    Need,
    Offer,
    PoolSpec,
    Provider,
    ResolvedReward,
    RewardFunction,
    RewardPart,
    Role,
    Scope,
    WorkerClass,
    WorkerRequest,
)

__all__ = [
    "CORE",
    "Algorithm",
    "AlgorithmKind",
    "AlgorithmPlan",
    "BuildContext",
    "Component",
    "ComponentPlan",
    "ConfigSection",
    "Facts",
    "ModelFacts",
    "ModelShape",
    "Need",
    "Offer",
    "Offers",
    "OldLogprobs",
    "PoolPlan",
    "PoolSpec",
    "Provider",
    "ResolvedReward",
    "RewardFunction",
    "RewardPart",
    "Role",
    "RunPlan",
    "SchedulePlan",
    "Scope",
    "WorkerClass",
    "WorkerPlan",
    "WorkerRequest",
    "make_plan",
    "plan_to_json",
]
