"""The core's test kit for plugin authors: fakes, and one conformance suite per kind of offer.

`rlcore.testing.null` is a plugin with a torch-free policy, `ByteTokens` (model.tokenizer=bytes) a tokenizer without
files; the suites (`rlcore.testing.suites`) check what a plugin offers, `check_plugin` what it declares.
"""

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rlcore.imports import names_for_checkers

if TYPE_CHECKING:  # the one list of public names: type checkers read it, and `_homes` does
    from rlcore.data.tokens import ByteTokens as ByteTokens
    from rlcore.testing.conformance import Report as Report
    from rlcore.testing.conformance import check_plugin as check_plugin
    from rlcore.testing.here import open_children as open_children
    from rlcore.testing.prompts import write_prompts as write_prompts
    from rlcore.testing.suites.actor import ActorWorkerSuite as ActorWorkerSuite
    from rlcore.testing.suites.agents import AgentLoopSuite as AgentLoopSuite
    from rlcore.testing.suites.cluster import ClusterSuite as ClusterSuite
    from rlcore.testing.suites.critic import CriticEngineSuite as CriticEngineSuite
    from rlcore.testing.suites.critic import CriticWorkerSuite as CriticWorkerSuite
    from rlcore.testing.suites.estimator import AdvantageEstimatorSuite as AdvantageEstimatorSuite
    from rlcore.testing.suites.policy_loss import PolicyLossSuite as PolicyLossSuite
    from rlcore.testing.suites.pool import ResourcePoolSuite as ResourcePoolSuite
    from rlcore.testing.suites.reference import ReferenceWorkerSuite as ReferenceWorkerSuite
    from rlcore.testing.suites.reward_function import RewardFunctionSuite as RewardFunctionSuite
    from rlcore.testing.suites.reward_manager import RewardManagerSuite as RewardManagerSuite
    from rlcore.testing.suites.reward_replica import RewardReplicaSuite as RewardReplicaSuite
    from rlcore.testing.suites.rollout import RolloutWorkerSuite as RolloutWorkerSuite
    from rlcore.testing.suites.scorer import ScorerSuite as ScorerSuite


@cache
def _homes() -> dict[str, str]:
    return names_for_checkers(__file__)


def __getattr__(name: str) -> Any:
    # Late, because reward children import `rlcore.testing.letters` and need neither configuration nor plugins.
    if name == "__all__":
        return sorted(_homes())
    if name.startswith("__") or name not in _homes():
        raise AttributeError(f"module 'rlcore.testing' has no attribute '{name}'")
    return getattr(import_module(_homes()[name]), name)
