"""The core's test kit for plugin authors: fakes, and a conformance suite for each kind of offer.

`rlcore.testing.null` is a plugin with a torch-free policy, `ByteTokens` (model.tokenizer=bytes) a tokenizer without
files; the suites (`rlcore.testing.suites`) check what a plugin offers, `check_plugin` what it declares.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlcore.testing.conformance import Report, check_plugin
    from rlcore.testing.prompts import write_prompts
    from rlcore.testing.suites.actor import ActorWorkerSuite
    from rlcore.testing.suites.agents import AgentLoopSuite
    from rlcore.testing.suites.cluster import ClusterSuite
    from rlcore.testing.suites.critic import CriticEngineSuite, CriticWorkerSuite
    from rlcore.testing.suites.estimator import AdvantageEstimatorSuite
    from rlcore.testing.suites.policy_loss import PolicyLossSuite
    from rlcore.testing.suites.pool import ResourcePoolSuite
    from rlcore.testing.suites.reference import ReferenceWorkerSuite
    from rlcore.testing.suites.reward_function import RewardFunctionSuite
    from rlcore.testing.suites.reward_manager import RewardManagerSuite
    from rlcore.testing.suites.reward_replica import RewardReplicaSuite
    from rlcore.testing.suites.rollout import RolloutWorkerSuite
    from rlcore.testing.suites.scorer import ScorerSuite

__all__ = [
    "ActorWorkerSuite",
    "AdvantageEstimatorSuite",
    "AgentLoopSuite",
    "ClusterSuite",
    "CriticEngineSuite",
    "CriticWorkerSuite",
    "PolicyLossSuite",
    "ReferenceWorkerSuite",
    "Report",
    "ResourcePoolSuite",
    "RewardFunctionSuite",
    "RewardManagerSuite",
    "RewardReplicaSuite",
    "RolloutWorkerSuite",
    "ScorerSuite",
    "check_plugin",
    "write_prompts",
]


def __getattr__(name: str) -> Any:
    # Late, because reward children import `rlcore.testing.letters` and need neither configuration nor plugins.
    if name in ("Report", "check_plugin"):
        from rlcore.testing import conformance

        return getattr(conformance, name)
    if name == "write_prompts":
        from rlcore.testing.prompts import write_prompts

        return write_prompts
    if name in __all__:
        from rlcore.testing import suites

        return getattr(suites, name)
    raise AttributeError(f"module 'rlcore.testing' has no attribute '{name}'")
