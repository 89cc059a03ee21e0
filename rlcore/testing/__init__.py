"""The core's test kit for plugin authors: fakes, and one conformance suite per kind of offer.

`rlcore.testing.null` is a plugin with a torch-free policy. `ByteTokens` (model.tokenizer=bytes) is a tokenizer without
files. The suites (`rlcore.testing.suites`) test the objects that a plugin offers; `check_plugin` checks its hooks.
"""

from typing import TYPE_CHECKING

from rlcore.imports import lazy_names

if TYPE_CHECKING:  # the one list of public names: type checkers read it, and `lazy_names` does
    from rlcore.data.tokenizer import ByteTokens as ByteTokens
    from rlcore.testing.conformance import Report as Report
    from rlcore.testing.conformance import check_plugin as check_plugin
    from rlcore.testing.here import open_children as open_children
    from rlcore.testing.prompts import LeastSeen as LeastSeen
    from rlcore.testing.prompts import write_prompts as write_prompts
    from rlcore.testing.suites.actor import ActorWorkerSuite as ActorWorkerSuite
    from rlcore.testing.suites.agents import AgentLoopSuite as AgentLoopSuite
    from rlcore.testing.suites.cluster import ClusterSuite as ClusterSuite
    from rlcore.testing.suites.critic import CriticEngineSuite as CriticEngineSuite
    from rlcore.testing.suites.critic import CriticWorkerSuite as CriticWorkerSuite
    from rlcore.testing.suites.estimator import AdvantageEstimatorSuite as AdvantageEstimatorSuite
    from rlcore.testing.suites.policy_loss import PolicyLossSuite as PolicyLossSuite
    from rlcore.testing.suites.pool import ResourcePoolSuite as ResourcePoolSuite
    from rlcore.testing.suites.prompt_order import PromptOrderSuite as PromptOrderSuite
    from rlcore.testing.suites.reference import ReferenceWorkerSuite as ReferenceWorkerSuite
    from rlcore.testing.suites.reward_function import RewardFunctionSuite as RewardFunctionSuite
    from rlcore.testing.suites.reward_manager import RewardManagerSuite as RewardManagerSuite
    from rlcore.testing.suites.reward_replica import RewardReplicaSuite as RewardReplicaSuite
    from rlcore.testing.suites.rollout import RolloutWorkerSuite as RolloutWorkerSuite
    from rlcore.testing.suites.scorer import ScorerSuite as ScorerSuite
    from rlcore.testing.suites.tracker import TrackerSuite as TrackerSuite


__getattr__, __dir__ = lazy_names(__name__, __file__)
