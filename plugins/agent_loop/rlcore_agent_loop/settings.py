"""The plugin's settings."""

from dataclasses import dataclass, field
from typing import Any, Literal

from rlcore.config import option

_OWN_TURNS = "plugins.agent_loop.agent.fn == ''"


@dataclass(frozen=True)
class ToolSettings:
    """One tool: a function, or a class with one object per sample, which keeps the sample's state."""

    fn: str = ""
    """file.py:name or module:name."""
    deadline_s: float = option(10.0, above=0)
    """Seconds a call may take. Then a sync tool's process is killed; an async call is cancelled."""
    max_result_chars: int = option(0, at_least=0)
    """Characters of a result that the policy sees; 0: the plugin's `max_result_chars`."""


@dataclass(frozen=True)
class McpSettings:
    """A server of the Model Context Protocol, whose tools keep their names; needs rlcore-agent-loop[mcp]."""

    command: tuple[str, ...] = ()
    """Program and arguments of a server that communicates over standard input and output."""
    url: str = ""
    """Address of a server that communicates over HTTP, instead of `command`."""
    tools: tuple[str, ...] = ()
    """Tools to use; empty: all of the server's."""
    start_s: float = option(30.0, above=0)
    """Seconds the server may take to start."""
    deadline_s: float = option(10.0, above=0)
    """Seconds a call may take."""
    max_result_chars: int = option(0, at_least=0)
    """Characters of a result that the policy sees; 0: the plugin's `max_result_chars`."""


@dataclass(frozen=True)
class EnvironmentSettings:
    """The environment, which answers the policy's turns without a tool call."""

    fn: str = ""
    """file.py:name or module:name of a class with `reset` and `step`; empty: a turn without a call ends the sample."""
    kwargs: dict[str, Any] = field(default_factory=dict, metadata={"used_when": "fn != ''"})
    """Arguments of the class."""
    deadline_s: float = option(10.0, used_when="fn != ''", above=0)
    """Seconds that a reset or step may take."""
    max_messages: int = option(256, used_when="fn != ''", at_least=1)
    """Messages that a reset or step may return; a sample whose environment returns more fails."""
    max_chars: int = option(1_000_000, used_when="fn != ''", at_least=1)
    """Characters of these messages together, each value in them counted as at least one."""


@dataclass(frozen=True)
class AgentSettings:
    """A program that talks to the policy through an OpenAI-compatible endpoint on this machine."""

    fn: str = ""
    """file.py:name or module:name of a function, or of a class made in each child and called; empty: the plugin's own
    loop of turns and tools."""
    kwargs: dict[str, Any] = field(default_factory=dict, metadata={"used_when": "fn != ''"})
    """Further arguments of the function, or the arguments of the class."""
    children: int = option(2, used_when="fn != ''", at_least=1)
    """Child processes in which it runs."""
    threads: int = option(16, used_when="fn != ''", at_least=1)
    """Samples that run at a time in each process; with 1, OPENAI_BASE_URL and OPENAI_API_KEY are set for each."""


@dataclass(frozen=True)
class AgentLoopSettings:
    """Tools, environment and limits; `plugins.agent_loop`."""

    tools: dict[str, ToolSettings] = field(default_factory=dict)
    """Functions and classes that the policy may call, by tool name."""
    mcp: dict[str, McpSettings] = field(default_factory=dict)
    """Servers of the Model Context Protocol whose tools the policy may call."""
    environment: EnvironmentSettings = field(default_factory=EnvironmentSettings)
    """The object that answers turns that call no tool: a user simulator, a game."""
    agent: AgentSettings = field(default_factory=AgentSettings)
    """A program that runs each sample, instead of turns and tools."""
    parser: str = "hermes"
    """Format of calls: hermes, llama3_json, pythonic, or file.py:name or module:name of a function."""
    describe_tools: Literal["template", "never"] = option("template", used_when=_OWN_TURNS)
    """template: the chat template describes the tools to the policy; never: `data.system_prompt` does."""
    tools_column: str = ""
    """Column with the names of the tools that a sample may call (no value: all); empty: all for every sample."""
    max_turns: int = option(4, at_least=1)
    """Most turns of the policy; calls in the last one are not made."""
    turn_tokens: int = option(0, at_least=0)
    """Most tokens of one turn; 0: what is left of `rollout.max_tokens`."""
    context_tokens: int = option(0, at_least=0)
    """Most tokens of prompt, turns and results together, up to the model's window; 0: that window."""
    time_s: float = option(3600.0, above=0)
    """Seconds a sample may take once admitted; waiting for the engine counts."""
    max_calls: int = option(8, used_when=_OWN_TURNS, at_least=1)
    """Calls of one turn; further ones are refused."""
    max_same_calls: int = option(3, used_when=_OWN_TURNS, at_least=1)
    """Turns in a row with the same calls after which the sample ends."""
    max_result_chars: int = option(2000, used_when=_OWN_TURNS, at_least=1)
    """Characters of a result that the policy sees."""
    max_conversations: int = option(1024, at_least=1)
    """Samples in progress at a time."""
    children: int = option(2, used_when=_OWN_TURNS, at_least=1)
    """Child processes of each worker for sync functions, one call at a time each, and as many again for classes and
    environments that keep the state of samples."""
    env: tuple[str, ...] = ()
    """Environment variables for tools, environment, agent and the programs of `mcp`, added to `PATH`, `HOME` and the
    like."""
    workers: int = option(0, at_least=0)
    """Separate processes for conversations (the role `agent`); 0: on the run's event loop."""
    result_role: str = option("tool", used_when=_OWN_TURNS)
    """Role of a result, for chat templates that reject `tool`."""
