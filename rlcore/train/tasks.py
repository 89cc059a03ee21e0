"""Prompts as tasks for the agent loop, each with a seed."""

import hashlib
from collections.abc import Sequence

from rlcore.config import EvalConfig, RolloutConfig
from rlcore.contracts.agents import RolloutTask
from rlcore.types import Prompt, Sampling


def tasks_for(prompts: Sequence[tuple[Prompt, int]], n: int, seed: int) -> list[RolloutTask]:
    """One task for each (prompt, epoch)."""
    return [RolloutTask(prompt, epoch, n, task_seed(seed, prompt.id, epoch)) for prompt, epoch in prompts]


def task_seed(seed: int, prompt_id: str, epoch: int) -> int:
    """The seed of a group, a function of its names only: neither the order of generation nor a restart changes it."""
    digest = hashlib.sha256(f"{seed}\0{prompt_id}\0{epoch}".encode()).digest()
    return int.from_bytes(digest[:7], "big")


def training_sampling(rollout: RolloutConfig) -> Sampling:
    """The sampling of training trajectories."""
    return Sampling(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        max_tokens=rollout.max_tokens,
        stop=rollout.stop,
    )


def evaluation_sampling(evaluation: EvalConfig, rollout: RolloutConfig) -> Sampling:
    """The sampling of held-out trajectories, where truncating the distribution biases nothing."""
    return Sampling(
        temperature=evaluation.temperature,
        top_p=evaluation.top_p,
        top_k=evaluation.top_k,
        min_p=evaluation.min_p,
        max_tokens=evaluation.max_tokens or rollout.max_tokens,
        stop=rollout.stop,
    )
