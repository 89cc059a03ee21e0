"""An rlcore plugin: multi-turn conversations with tools, environments and external agent programs."""

from collections.abc import Sequence

from rlcore import ConfigSection
from rlcore.config import RunConfig
from rlcore.contracts.agents import AgentLoop
from rlcore.contracts.components import BuildContext, Component
from rlcore.contracts.hooks import hookimpl
from rlcore.contracts.offers import RewardFunction, WorkerClass
from rlcore.contracts.requests import WorkerRequest
from rlcore.errors import PluginError
from rlcore_agent_loop.checks import ENVIRONMENT_REWARDS, check_settings
from rlcore_agent_loop.conversation.environments import Environment, Step
from rlcore_agent_loop.settings import AgentLoopSettings
from rlcore_agent_loop.tools.calls import ToolCall
from rlcore_agent_loop.workers.worker import AGENT, AgentWorker, LoopWorker

__all__ = ["AgentLoopSettings", "AgentWorker", "Environment", "Step", "ToolCall"]

BACKEND = "loop"


def requests(config: RunConfig, section: AgentLoopSettings) -> Sequence[WorkerRequest]:
    """Workers for the conversations, if any. Also checks the settings."""
    check_settings(config, section)
    if not section.workers:
        return ()
    return [WorkerRequest(AGENT, BACKEND, replicas=section.workers, threads=1, isolated=True)]


def build(context: BuildContext) -> AgentLoop:
    """The agent loop, on the run's event loop or in separate workers."""
    from rlcore_agent_loop.loop import ToolLoop
    from rlcore_agent_loop.workers.distributed_loop import DistributedToolLoop

    if context.generator is None:
        raise PluginError("agent loop 'agent_loop': it was built without a rollout service")
    settings = context.settings(AgentLoopSettings)
    if settings.workers:
        workers = context.workers(AGENT)
        return DistributedToolLoop(context.generator, workers, settings, context.context_length)
    return ToolLoop(context.generator, context.tokens, context.children, settings, context.context_length)


@hookimpl
def rlcore_config_sections() -> Sequence[ConfigSection]:
    return [ConfigSection("agent_loop", AgentLoopSettings, {"rollout.agent": "agent_loop"})]


@hookimpl
def rlcore_agent_loops() -> Sequence[Component[AgentLoop]]:
    return [Component("agent_loop", build, requests)]


@hookimpl
def rlcore_worker_classes() -> Sequence[WorkerClass]:
    return [WorkerClass(AgentWorker, BACKEND, LoopWorker)]


@hookimpl
def rlcore_reward_functions() -> Sequence[RewardFunction]:
    return [RewardFunction(name, f"rlcore_agent_loop.rewards:{name}") for name in ENVIRONMENT_REWARDS]
