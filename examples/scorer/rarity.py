"""A plugin in one file: rare responses of a group get a higher score, in addition to `reward.functions`."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rlcore import (
    BuildContext,
    Component,
    FunctionRewards,
    Lane,
    Outcome,
    RewardComponent,
    RewardManager,
    RewardStatus,
    RunConfig,
    Scope,
    Scorer,
    Trajectory,
    hookimpl,
)

RLCORE_API = "1"
NAME, WEIGHT = "rarity", 0.1


class Rarity(Scorer):
    """1 for a response that is alone in its group, 1/n where n samples are the same, nothing for an empty one."""

    name = NAME
    scope = Scope.GROUP
    weight = WEIGHT

    async def score(self, trajectories: Sequence[Trajectory], lane: Lane) -> list[Outcome]:
        texts = [trajectory.text().strip() for trajectory in trajectories]
        times = Counter(texts)
        return [Outcome(RewardStatus.OK, 1 / times[text]) if text else Outcome(RewardStatus.SKIPPED) for text in texts]


def build(context: BuildContext) -> RewardManager:
    """The core's manager, which also asks our scorer."""
    return FunctionRewards(context, [Rarity()])


def reward_components(config: RunConfig, section: Any) -> Sequence[RewardComponent]:
    """The line of the reward that `rlcore plan` shows."""
    return [RewardComponent(NAME, WEIGHT, Scope.GROUP, deadline_s=1.0, kind="scorer", served_by="the run's process")]


@hookimpl
def rlcore_reward_managers() -> Sequence[Component[RewardManager]]:
    return [Component(NAME, build, reward_components=reward_components, uses_reward_functions=True)]
