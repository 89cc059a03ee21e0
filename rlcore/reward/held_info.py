"""A budget for values that rewards return with their scores, which stay in memory until their step ends."""

from collections.abc import Mapping
from dataclasses import replace
from weakref import WeakKeyDictionary

from rlcore.contracts.scorer import Outcome, memory_of
from rlcore.types import FrozenDict, Reward, RewardStatus

SMALL = 1 << 16
"""Info up to this many bytes is not counted."""
BUDGET = 256 << 20
"""Bytes that all rewards may hold in addition to their scores at a time."""

# One table for the whole process, because memory is shared: rewards that are still referenced, with the bytes of their
# info.
_held: WeakKeyDictionary[Reward, int] = WeakKeyDictionary()


def within_budget(reward: Reward, outcomes: Mapping[str, Outcome]) -> Reward:
    """The reward, or a failed one without its info if the info would exceed BUDGET."""
    size = memory_of(reward.info) if reward.info else 0
    if size <= SMALL:
        return reward
    if sum(_held.values()) + size > BUDGET:
        error = f"more than {BUDGET >> 20} MiB are returned besides the scores of a step; functions need to return less"
        info = {"error": error, "failed": FrozenDict(dict.fromkeys(outcomes, error))}
        return replace(reward, score=0.0, status=RewardStatus.FAILED, token_scores=None, info=FrozenDict(info))
    _held[reward] = size
    return reward
