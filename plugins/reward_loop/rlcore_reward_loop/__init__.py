"""An rlcore plugin: rewards from a scoring service."""

from collections.abc import Sequence

from rlcore.config import RunConfig
from rlcore.hookspecs import hookimpl
from rlcore.plan import BuildContext, Component, ConfigSection, WorkerRequest
from rlcore.reward import RewardManager
from rlcore_reward_loop.settings import RewardLoopSettings, check_url


def requests(config: RunConfig, section: RewardLoopSettings) -> Sequence[WorkerRequest]:
    """No workers; but the planner asks here, so this is where a missing address is said before anything starts."""
    check_url(section)
    return ()


def build(context: BuildContext) -> RewardManager:
    """The manager; imported late, because aiohttp takes a quarter of a second and a plan does not need it."""
    from rlcore_reward_loop.manager import RewardLoop

    return RewardLoop(context.section)


@hookimpl
def rlcore_config_sections() -> Sequence[ConfigSection]:
    return [ConfigSection("reward_loop", RewardLoopSettings, {"reward.manager": "reward_loop"})]


@hookimpl
def rlcore_reward_managers() -> Sequence[Component[RewardManager]]:
    return [Component("reward_loop", build, requests)]
