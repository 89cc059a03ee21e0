"""Settings that cannot work, and whole runs on the policy without torch."""

from pathlib import Path

import pytest
from rlcore_agent_loop import requests
from rlcore_agent_loop.settings import AgentLoopSettings, ToolSettings

from rlcore.config import RunConfig
from rlcore.errors import ConfigError
from rlcore.report import metrics
from rlcore.testing import write_prompts
from rlcore.train import train


@pytest.mark.parametrize(
    ("tools", "expected"),
    [
        ({}, "there is none"),
        ({"add": ToolSettings("add")}, "found 'add'; needs file.py:name or module:name"),
        ({"add": ToolSettings("nowhere.py:add")}, "found no file 'nowhere.py'"),
    ],
)
def test_tools_that_cannot_work_are_said_when_the_plan_is_made(tools: dict[str, ToolSettings], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        requests(RunConfig(), AgentLoopSettings(tools=tools))


@pytest.mark.slow
def test_a_run_with_the_plugin_trains_and_measures_the_agent(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def add(a, b):\n    return a + b\n\n"
        "def score(trajectory):\n    return float(trajectory.completion[0]['role'] == 'assistant')\n"
    )
    config = {
        "model": {"path": "", "tokenizer": "bytes"},
        "data": {"sources": {"train": {"path": str(write_prompts(tmp_path / "prompts.jsonl", 8))}}},
        "rollout": {"backend": "null", "samples_per_prompt": 4, "max_tokens": 8},
        "reward": {"functions": {"roles": {"fn": f"{tmp_path / 'mine.py'}:score"}}},
        "actor": {"backend": "null"},
        "train": {"prompts_per_step": 2, "max_steps": 2, "dir": str(tmp_path), "name": "run"},
        "plugins": {
            "agent_loop": {
                "tools": {"add": {"fn": f"{tmp_path / 'mine.py'}:add"}},
                "children": 1,
                "describe_tools": "never",
            }
        },
    }
    result = train(config, plugins=["null"])
    steps = [row for row in metrics.read(result.run_dir) if "reward/mean" in row]
    assert [row["agent/turns_mean"] for row in steps] == [1.0, 1.0]
    assert [row["reward/roles/mean"] for row in steps] == [1.0, 1.0]
