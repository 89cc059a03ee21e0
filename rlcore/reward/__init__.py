"""Rewards: the slot's interface and the core's own manager of reward functions."""

from typing import TYPE_CHECKING, Any

from rlcore.reward.replica import RawScore, RewardReplica, ScoreRequest

if TYPE_CHECKING:
    from rlcore.reward.functions import FunctionRewards, build_function_rewards
    from rlcore.reward.manager import RewardManager

__all__ = ["FunctionRewards", "RawScore", "RewardManager", "RewardReplica", "ScoreRequest", "build_function_rewards"]


def __getattr__(name: str) -> Any:
    # Late, because reward children import this package and need neither the configuration nor the plan.
    if name in ("FunctionRewards", "build_function_rewards"):
        from rlcore.reward import functions

        return getattr(functions, name)
    if name == "RewardManager":
        from rlcore.reward import manager

        return manager.RewardManager
    raise AttributeError(f"module 'rlcore.reward' has no attribute '{name}'")
