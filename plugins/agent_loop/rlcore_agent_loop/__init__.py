"""An rlcore plugin: the policy calls tools over several turns."""

from collections.abc import Sequence

from rlcore.agents import AgentLoop
from rlcore.config import RunConfig
from rlcore.errors import PluginError
from rlcore.hookspecs import hookimpl
from rlcore.plan import BuildContext, Component, ConfigSection, WorkerRequest
from rlcore_agent_loop.loop import ToolLoop
from rlcore_agent_loop.settings import AgentLoopSettings, check_tools
from rlcore_agent_loop.tools import Tools


def requests(config: RunConfig, section: AgentLoopSettings) -> Sequence[WorkerRequest]:
    """No workers; but the planner asks here, so what is wrong with the settings is said before anything starts."""
    check_tools(section)
    return ()


def build(context: BuildContext) -> AgentLoop:
    """The loop, on the run's rollout service."""
    if context.generator is None:
        raise PluginError("agent loop 'agent_loop': it was built without a rollout service")
    settings: AgentLoopSettings = context.section
    return ToolLoop(context.generator, context.tokens, Tools(context.children, settings), settings)


@hookimpl
def rlcore_config_sections() -> Sequence[ConfigSection]:
    return [ConfigSection("agent_loop", AgentLoopSettings, {"rollout.agent": "agent_loop"})]


@hookimpl
def rlcore_agent_loops() -> Sequence[Component[AgentLoop]]:
    return [Component("agent_loop", build, requests)]
