"""The start-up canary: before anything is trained, a response known to be good must score well."""

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

import numpy as np

from rlcore.config import RewardConfig
from rlcore.contracts.reward_manager import RewardManager
from rlcore.errors import ConfigError, RewardError
from rlcore.reward.scorers import answer_text
from rlcore.types import FinishReason, Lane, Prompt, RewardStatus, ScoredTrajectory, Trajectory, TrajectoryId

if TYPE_CHECKING:
    from rlcore.contracts.tokens import Tokens

NUM_EXAMPLES = 4
"""Prompts of each source that canaries are made from."""


async def check_canary(
    manager: RewardManager, prompts: Sequence[Prompt], config: RewardConfig, tokens: "Tokens"
) -> tuple[float, int]:
    """The lowest score of the canaries and their number.

    RewardError, naming prompt, response and score, when one fails or scores below `reward.canary_min`.
    """
    known = [prompt for prompt in prompts if prompt.answer is not None]
    if not known:
        raise ConfigError("reward.canary: none of the first prompts has an answer; set data.sources.<x>.answer_column")
    canaries = [canary(name, config.canary, tokens) for name in known]

    async def stream() -> AsyncIterator[Trajectory]:
        for canary in canaries:
            yield canary

    least = float("inf")
    async with aclosing(manager.score(stream(), Lane.EVAL)) as results:  # type: ignore[type-var]
        async for scored in results:
            _judge(scored, config.canary_min)
            least = min(least, scored.reward.score)
    return least, len(canaries)


def canary(prompt: Prompt, template: str, tokens: "Tokens") -> Trajectory:
    """The known-good response to a prompt; its text stands for itself, and its one sampled token is the end of turn."""
    ids = [*tokens.encode_prompt(prompt.messages), min(tokens.eos_ids, default=tokens.pad_id)]
    mask = np.zeros(len(ids), dtype=np.bool_)
    mask[-1] = True
    return Trajectory(
        id=TrajectoryId(prompt.id, 0, 0),
        prompt=prompt,
        token_ids=np.array(ids, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.zeros(len(ids), dtype=np.float32),
        completion=template.replace("{answer}", answer_text(prompt.answer)),
        finish=FinishReason.STOP,
        versions=((len(ids) - 1, 0),),
    )


def _judge(scored: ScoredTrajectory, least: float) -> None:
    reward, trajectory = scored.reward, scored.trajectory
    if reward.status is RewardStatus.OK and reward.score >= least:
        return
    whose = f"reward.canary: the known-good response {trajectory.text()!r} to prompt '{trajectory.prompt.id}'"
    least_score = f"reward.canary_min={least:g}, so nothing is trained: put the reward function"
    if reward.status is not RewardStatus.OK:
        raise RewardError(
            f"{whose} did not get a score: {reward.info.get('error')}; needs a score of at least {least_score} right"
        )
    parts = ", ".join(f"{name}={score:g}" for name, score in reward.components.items())
    raise RewardError(
        f"{whose} scored {reward.score:g} ({parts}); needs at least {least_score}, the template or the answers right"
    )
