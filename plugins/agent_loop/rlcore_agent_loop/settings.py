"""The plugin's settings."""

from dataclasses import dataclass, field
from pathlib import Path

from rlcore.config.options import option
from rlcore.errors import ConfigError


@dataclass(frozen=True)
class ToolSettings:
    """One tool."""

    fn: str = ""
    """file.py:name or module:name of a plain function."""
    deadline_s: float = option(10.0, above=0)
    """Seconds a call may take; then its process is killed."""


@dataclass(frozen=True)
class AgentLoopSettings:
    """Tools and limits; `plugins.agent_loop`."""

    tools: dict[str, ToolSettings] = field(default_factory=dict)
    """Functions that the policy may call, by the name it calls them."""
    max_turns: int = option(4, at_least=1)
    """Turns of the policy at most."""
    max_result_chars: int = option(2000, at_least=1)
    """Characters of a result that the policy gets to see."""
    children: int = option(2, at_least=1)
    """Child processes in which tools run."""
    result_role: str = "tool"
    """Role of the message that holds a result."""


def check_tools(settings: AgentLoopSettings) -> None:
    """ConfigError naming the key when there is no tool, or one without a usable reference."""
    if not settings.tools:
        raise ConfigError(
            "plugins.agent_loop.tools: there is none, so no turn could follow the first; needs at least one, such as "
            "plugins.agent_loop.tools.add.fn=my_tools.py:add, or rollout.agent=single_turn"
        )
    for name, tool in settings.tools.items():
        key, (where, _, attribute) = f"plugins.agent_loop.tools.{name}.fn", tool.fn.rpartition(":")
        if not where or not attribute:
            raise ConfigError(f"{key}: found '{tool.fn}'; needs file.py:name or module:name")
        if where.endswith(".py") and not Path(where).is_file():
            raise ConfigError(f"{key}: there is no file '{where}'; needs one, relative to {Path.cwd()}")


def absolute(reference: str) -> str:
    """The reference with a full path, as a child may run elsewhere."""
    where, _, attribute = reference.rpartition(":")
    return f"{Path(where).absolute()}:{attribute}" if where.endswith(".py") else reference
