"""Rewards: the slot's interface and the core's own manager of reward functions."""

from rlcore.reward.manager import RewardManager

__all__ = ["RewardManager"]
