"""Checks the settings when the plan is made."""

from dataclasses import replace
from pathlib import Path

from rlcore.config import RunConfig
from rlcore.contracts.children import check_exported
from rlcore.errors import ConfigError, nearest
from rlcore_agent_loop.settings import AgentLoopSettings
from rlcore_agent_loop.tools.parsers import PARSERS

HERE = "plugins.agent_loop"
ENVIRONMENT_REWARDS = ("environment", "environment_by_turn")
"""The reward functions of this plugin."""


def check_settings(config: RunConfig, settings: AgentLoopSettings) -> None:
    """ConfigError naming the key."""
    _check_purpose(settings)
    _check_rewards(config, settings)
    for name, tool in settings.tools.items():
        _check_target(f"{HERE}.tools.{name}.fn", tool.fn)
    for name, server in settings.mcp.items():
        if bool(server.command) == bool(server.url):
            found = "both command and url" if server.url else "neither command nor url"
            raise ConfigError(f"{HERE}.mcp.{name}: found {found}; needs one of them")
    if settings.environment.fn:
        _check_target(f"{HERE}.environment.fn", settings.environment.fn)
    if settings.agent.fn:
        _check_target(f"{HERE}.agent.fn", settings.agent.fn)
    if settings.parser not in PARSERS:
        if ":" not in settings.parser:
            hint = nearest(settings.parser, list(PARSERS))
            raise ConfigError(f"{HERE}.parser: there is no parser '{settings.parser}'; {hint}; or file.py:name")
        _check_target(f"{HERE}.parser", settings.parser)
    if not settings.workers:  # their children have the environment of another process, on Ray of another node
        check_exported(f"{HERE}.env", settings.env)
    _check_limits(config, settings)


def _check_purpose(settings: AgentLoopSettings) -> None:
    tools = [f"{HERE}.{name}" for name in ("tools", "mcp") if getattr(settings, name)]
    if settings.agent.fn:
        idle = [*tools, *([f"{HERE}.environment.fn"] if settings.environment.fn else [])]
        if idle:
            raise ConfigError(
                f"{idle[0]}: it has no effect with {HERE}.agent.fn, whose program brings its tools; leave one out"
            )
    elif not tools and not settings.environment.fn:
        raise ConfigError(
            f"{HERE}.tools: there is none, so no turn could follow the first; needs at least one, such as "
            f"{HERE}.tools.add.fn=my_tools.py:add, or {HERE}.mcp, {HERE}.environment.fn, {HERE}.agent.fn, or "
            "rollout.agent=single_turn"
        )
    if settings.tools_column and not tools:
        raise ConfigError(f"{HERE}.tools_column: it has no effect without {HERE}.tools or {HERE}.mcp; leave it out")


def _check_rewards(config: RunConfig, settings: AgentLoopSettings) -> None:
    has_rewards = bool(settings.environment.fn or settings.agent.fn)
    for name, function in config.reward.functions.items():
        own = function.fn.removeprefix("rlcore_agent_loop.rewards:")
        if own not in ENVIRONMENT_REWARDS:
            continue
        if not has_rewards:
            raise ConfigError(
                f"reward.functions.{name}.fn: {function.fn} returns the reward of an environment or agent; there is "
                f"neither; needs {HERE}.environment.fn or {HERE}.agent.fn, or another function"
            )
        if config.reward.canary:
            raise ConfigError(
                f"reward.canary: reward.functions.{name}.fn={function.fn} returns the reward of an environment or "
                "agent, and a canary comes from neither, so it never gets a score; leave reward.canary out"
            )
        if own == "environment_by_turn" and config.algo.advantage == "gdpo":
            raise ConfigError(
                f"reward.functions.{name}.fn: environment_by_turn scores tokens, and algo.advantage=gdpo compares the "
                f"score of each function; set reward.functions.{name}.fn=environment, or choose another estimator"
            )


def _check_limits(config: RunConfig, settings: AgentLoopSettings) -> None:
    lanes = {"rollout": config.rollout.samples_per_prompt}
    if config.eval.sources:
        lanes["eval"] = config.eval.samples_per_prompt
    for name, num_samples in lanes.items():
        if num_samples > settings.max_conversations:
            raise ConfigError(
                f"{HERE}.max_conversations: it is {settings.max_conversations}, but {name}.samples_per_prompt is "
                f"{num_samples}, and the samples of a prompt begin together; needs at least that many"
            )
    if settings.turn_tokens > config.rollout.max_tokens:
        raise ConfigError(
            f"{HERE}.turn_tokens: it is {settings.turn_tokens}, and rollout.max_tokens={config.rollout.max_tokens} "
            "bounds all turns together; lower it"
        )


def _check_target(key: str, target: str) -> None:
    where, _, attribute = target.rpartition(":")
    if not where or not attribute:
        raise ConfigError(f"{key}: found '{target}'; needs file.py:name or module:name")
    if where.endswith(".py") and not Path(where).is_file():
        raise ConfigError(f"{key}: found no file '{where}'; needs one, relative to {Path.cwd()}")


def located(settings: AgentLoopSettings) -> AgentLoopSettings:
    """The settings with absolute paths, for a process with another working directory."""
    return replace(
        settings,
        tools={name: replace(tool, fn=absolute(tool.fn)) for name, tool in settings.tools.items()},
        environment=replace(settings.environment, fn=absolute(settings.environment.fn)),
        agent=replace(settings.agent, fn=absolute(settings.agent.fn)),
        parser=absolute(settings.parser),
    )


def absolute(target: str) -> str:
    """The reference with an absolute path, because a child may have another working directory."""
    where, _, attribute = target.rpartition(":")
    return f"{Path(where).absolute()}:{attribute}" if where.endswith(".py") else target
