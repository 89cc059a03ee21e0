"""Rewards for the form of a response: its length, and tags in their order. Meant to be small parts of a sum."""

import re
from collections.abc import Sequence

from rlcore import FrozenDict, Reward, RewardFunction, Trajectory, hookimpl


def short(trajectory: Trajectory, free_tokens: int = 128, zero_tokens: int = 512) -> Reward:
    """1.0 up to `free_tokens` sampled tokens, 0.0 from `zero_tokens` on, and a straight line between.

    ValueError unless 0 <= free_tokens < zero_tokens.
    """
    if not 0 <= free_tokens < zero_tokens:
        raise ValueError(f"found free_tokens={free_tokens}, zero_tokens={zero_tokens}; needs 0 <= free < zero")
    sampled = int(trajectory.loss_mask.sum())
    share = (zero_tokens - sampled) / (zero_tokens - free_tokens)
    return Reward(min(1.0, max(0.0, share)), info=FrozenDict({"num_sampled": sampled}))


def tagged(trajectory: Trajectory, tags: Sequence[str] = ("think", "answer")) -> Reward:
    """1.0 when the response is exactly these tags, each once, closed and in order; else half the share that is there.

    What stands between the tags may be anything but one of the tags.
    """
    text = trajectory.text()
    whole = r"\s*".join(f"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>" for tag in tags)
    once = [text.count(f"<{tag}>") == text.count(f"</{tag}>") == 1 for tag in tags]
    if all(once) and re.fullmatch(whole, text.strip(), re.DOTALL):
        return Reward(1.0)
    return Reward(0.5 * sum(once) / max(1, len(tags)))


@hookimpl
def rlcore_reward_functions() -> list[RewardFunction]:
    return [RewardFunction(name=name, target=f"rlcore_style:{name}") for name in ("short", "tagged")]
