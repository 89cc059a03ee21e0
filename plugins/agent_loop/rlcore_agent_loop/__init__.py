"""An rlcore plugin: the policy talks over several turns, with tools, environments and agents of anybody's making."""

from collections.abc import Sequence

from rlcore.agents import AgentLoop
from rlcore.config import RunConfig
from rlcore.errors import PluginError
from rlcore.hookspecs import hookimpl
from rlcore.plan import BuildContext, Component, ConfigSection, RewardFunction, WorkerRequest
from rlcore_agent_loop.calls import ToolCall
from rlcore_agent_loop.checks import check_settings
from rlcore_agent_loop.environments import Environment, Step
from rlcore_agent_loop.settings import AgentLoopSettings

__all__ = ["AgentLoopSettings", "Environment", "Step", "ToolCall"]


def requests(config: RunConfig, section: AgentLoopSettings) -> Sequence[WorkerRequest]:
    """No workers; but the planner asks here, so what is wrong with the settings is said before anything starts."""
    check_settings(config, section)
    return ()


def build(context: BuildContext) -> AgentLoop:
    """The loop, on the run's rollout service."""
    from rlcore_agent_loop.loop import ToolLoop

    if context.generator is None:
        raise PluginError("agent loop 'agent_loop': it was built without a rollout service")
    return ToolLoop(context.generator, context.tokens, context.children, context.section)


@hookimpl
def rlcore_config_sections() -> Sequence[ConfigSection]:
    return [ConfigSection("agent_loop", AgentLoopSettings, {"rollout.agent": "agent_loop"})]


@hookimpl
def rlcore_agent_loops() -> Sequence[Component[AgentLoop]]:
    return [Component("agent_loop", build, requests)]


@hookimpl
def rlcore_reward_functions() -> Sequence[RewardFunction]:
    return [RewardFunction("environment", "rlcore_agent_loop.rewards:environment")]
