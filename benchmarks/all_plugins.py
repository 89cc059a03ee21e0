"""The run of `overhead.py` with reward loop, agent loop and critic engine, on the null model."""

from pathlib import Path
from typing import Any

PLUGINS = ("null", "reward_loop", "agent_loop", "critic_engine")
STOPS = [chr(byte) for byte in range(32, 48)]
"""One byte in sixteen ends a turn: turns of the null model have 16 tokens on average."""
TURN_TOKENS = 64
TOOL = '''
from rlcore_agent_loop.tools.calls import ToolCall


async def same(text):
    """Answers at once."""
    return text


def always(text):
    """Every turn calls the tool."""
    return [ToolCall("same", {"text": text})]
'''


def all_plugins(directory: Path, turns: int, workers: int, url: str) -> dict[str, Any]:
    """Settings of the run: each sample has `turns` turns with a call between two of them, a reward, and values.

    `workers` is the number of workers of the role agent; with 0 the controller's loop runs the agent. `url` is the
    address of the reward service; empty: a function computes rewards.
    """
    (directory / "tool.py").write_text(TOOL)
    reward_loop: dict[str, Any] = {"expose": True}
    if url:
        reward_loop = {
            "services": {"scorer": {"urls": [f"{url}/score"], "concurrency": 64}},
            "rewards": {"helpful": {"served_by": "scorer"}},
        }
    return {
        "algo": {"preset": "ppo"},
        "rollout": {"stop": STOPS},
        "plugins": {
            "agent_loop": {
                "tools": {"same": {"fn": f"{directory / 'tool.py'}:same"}},
                "parser": f"{directory / 'tool.py'}:always",
                "describe_tools": "never",
                "max_turns": turns,
                "max_same_calls": turns,
                "turn_tokens": TURN_TOKENS,
                "children": 1,
                "workers": workers,
            },
            "reward_loop": reward_loop,
            "critic_engine": {"backend": "null"},
        },
    }
