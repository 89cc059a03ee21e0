"""The core's test kit for plugin authors: fakes, and a conformance suite for each kind of offer.

`rlcore.testing.null` is a plugin with a torch-free policy, `ByteTokens` (model.tokenizer=bytes) a tokenizer without
files; the suites (`rlcore.testing.suites`) check what a plugin offers, `check_plugin` what it declares.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlcore.testing.conformance import Report, check_plugin
    from rlcore.testing.prompts import write_prompts
    from rlcore.testing.suites import (
        ActorWorkerSuite,
        AdvantageEstimatorSuite,
        AgentLoopSuite,
        CriticEngineSuite,
        CriticWorkerSuite,
        PolicyLossSuite,
        ReferenceWorkerSuite,
        ResourcePoolSuite,
        RewardFunctionSuite,
        RewardManagerSuite,
        RewardReplicaSuite,
        RolloutWorkerSuite,
        ScorerSuite,
    )

__all__ = [
    "ActorWorkerSuite",
    "AdvantageEstimatorSuite",
    "AgentLoopSuite",
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
