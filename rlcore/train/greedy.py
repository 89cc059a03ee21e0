"""Greedy baselines: one more sample of each prompt, decoded greedily, for estimators (ReMax) that compare with it.

It is sampled and scored like any other and is not trained on. Its epoch is negative, unlike a training sample's, so ids
never match.
"""

from collections.abc import Sequence
from dataclasses import replace

from rlcore.contracts.agents import RolloutTask
from rlcore.reward.policy import Budget, apply_failures
from rlcore.runtime.launch import Runtime
from rlcore.train.pending import Group, collect
from rlcore.train.tasks import training_sampling
from rlcore.train.timing import StepTimeline, now
from rlcore.types import Lane, Metrics, total_rewards


async def with_greedy_baselines(
    run: Runtime,
    tasks: Sequence[RolloutTask],
    groups: Sequence[Group],
    metrics: Metrics,
    budget: Budget,
    timeline: StepTimeline,
) -> list[Group]:
    """The groups with the reward of a greedy sample of their prompt as `ScoredTrajectory.baseline`.

    It includes token scores. A group whose greedy sample failed is dropped, because it has no baseline. Failed rewards
    follow the usual policies and the step's `budget` of greedy samples. Adds to `metrics`: reward/greedy_mean and
    data/greedy_failed; and the time to `timeline`.
    """
    config = run.plan.config
    wanted = {_prompt_of(group) for group in groups}
    baselines = [replace(task, epoch=-1 - task.epoch, n=1) for task in tasks if (task.prompt.id, task.epoch) in wanted]
    sampling = replace(training_sampling(config.rollout), temperature=0.0)
    began = now()
    answered, generated_s = await collect(run.agent, run.reward, baselines, sampling, Lane.TRAIN)
    timeline.waited(began, began + generated_s)
    kept, _ = apply_failures(answered, config.reward, budget)
    scores = {_greedy_of(group): total_rewards(group)[group[0].trajectory.id.unit()] for group in kept}
    metrics["data/greedy_failed"] = metrics.get("data/greedy_failed", 0.0) + len(baselines) - len(scores)
    if scores:
        metrics["reward/greedy_mean"] = sum(scores.values()) / len(scores)
    return [
        [replace(scored, baseline=scores[_prompt_of(group)]) for scored in group]
        for group in groups
        if _prompt_of(group) in scores
    ]


def _prompt_of(group: Group) -> tuple[str, int]:
    row = group[0].trajectory.id
    return row.prompt, row.epoch


def _greedy_of(group: Group) -> tuple[str, int]:
    """The prompt and epoch of the group that a greedy sample is the baseline of."""
    row = group[0].trajectory.id
    return row.prompt, -1 - row.epoch
