"""One conformance suite per kind of offer: subclass one, set `target`, and pytest runs its checks.

Every offer must pass the basic checks. Further checks run if an attribute claims the property that they test. Nothing
here imports pytest.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlcore.testing.suites.actor import ActorWorkerSuite
    from rlcore.testing.suites.agents import AgentLoopSuite
    from rlcore.testing.suites.cluster import ClusterSuite
    from rlcore.testing.suites.critic import CriticEngineSuite, CriticWorkerSuite
    from rlcore.testing.suites.estimator import AdvantageEstimatorSuite
    from rlcore.testing.suites.harness import checks, failures
    from rlcore.testing.suites.policy_loss import PolicyLossSuite
    from rlcore.testing.suites.pool import ResourcePoolSuite
    from rlcore.testing.suites.prompt_order import PromptOrderSuite
    from rlcore.testing.suites.reference import ReferenceWorkerSuite
    from rlcore.testing.suites.reward_function import RewardFunctionSuite
    from rlcore.testing.suites.reward_manager import RewardManagerSuite
    from rlcore.testing.suites.reward_replica import RewardReplicaSuite
    from rlcore.testing.suites.rollout import RolloutWorkerSuite
    from rlcore.testing.suites.scorer import ScorerSuite
    from rlcore.testing.suites.tracker import TrackerSuite

__all__ = [
    "ActorWorkerSuite",
    "AdvantageEstimatorSuite",
    "AgentLoopSuite",
    "ClusterSuite",
    "CriticEngineSuite",
    "CriticWorkerSuite",
    "PolicyLossSuite",
    "PromptOrderSuite",
    "ReferenceWorkerSuite",
    "ResourcePoolSuite",
    "RewardFunctionSuite",
    "RewardManagerSuite",
    "RewardReplicaSuite",
    "RolloutWorkerSuite",
    "ScorerSuite",
    "TrackerSuite",
    "checks",
    "failures",
]

_MODULES = {
    "ActorWorkerSuite": "actor",
    "AdvantageEstimatorSuite": "estimator",
    "AgentLoopSuite": "agents",
    "ClusterSuite": "cluster",
    "CriticEngineSuite": "critic",
    "CriticWorkerSuite": "critic",
    "PolicyLossSuite": "policy_loss",
    "PromptOrderSuite": "prompt_order",
    "ReferenceWorkerSuite": "reference",
    "ResourcePoolSuite": "pool",
    "RewardFunctionSuite": "reward_function",
    "RewardManagerSuite": "reward_manager",
    "RewardReplicaSuite": "reward_replica",
    "RolloutWorkerSuite": "rollout",
    "ScorerSuite": "scorer",
    "TrackerSuite": "tracker",
    "checks": "harness",
    "failures": "harness",
}


def __getattr__(name: str) -> Any:
    # Imported late: the suite of one offer does not need the imports of another, such as torch.
    if name not in _MODULES:
        raise AttributeError(f"module 'rlcore.testing.suites' has no attribute '{name}'")
    return getattr(import_module(f"rlcore.testing.suites.{_MODULES[name]}"), name)
