"""Metrics that are measured with a clock are named `time/...`: a run with every plugin, twice, at two speeds."""

import json
import re
import zlib
from pathlib import Path
from typing import Any

import pytest

from rlcore.report import metrics
from rlcore.testing import write_prompts
from rlcore.testing.runs import CLOCK, VARYING_ENDS, differing
from rlcore.testing.service import ServiceAnswer, ServiceCall, serving
from rlcore.train import train

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

OF_A_CLOCK = re.compile(r"(_s|_ms|_seconds|latency\w*|duration\w*|_p\d\d|_per_s|tflops|mfu|busy_frac|overhead)(/|$)")
PLUGINS = ("null", "reward_loop", "agent_loop", "critic_engine")
FILES = """
import asyncio
from rlcore_agent_loop.tools.calls import ToolCall

async def same(text):
    return text

def always(text):
    return [ToolCall("same", {"text": text})]

async def low(trajectory):
    await asyncio.sleep(0.001)
    return len(trajectory.token_ids) / 100

def long(trajectory):
    return len(trajectory.token_ids) / 200
"""


def share(text: str) -> float:
    return zlib.crc32(text.encode()) / 2**32


def config(directory: Path, name: str, url: str, null: dict[str, Any]) -> dict[str, Any]:
    """Every plugin of this repository that computes without a GPU."""
    return {
        "model": {"path": "", "tokenizer": "bytes"},
        "algo": {"preset": "ppo"},
        "data": {"sources": {"train": {"path": str(directory / "prompts.jsonl")}}},
        "rollout": {"backend": "null_replica", "replicas": 2, "samples_per_prompt": 4, "max_tokens": 24},
        "actor": {"backend": "null", "lr": 0.1, "minibatch_prompts": 2},
        "reward": {
            "functions": {
                "low": {"fn": f"{directory / 'files.py'}:low"},
                "long": {"fn": f"{directory / 'files.py'}:long", "children": 1},
            }
        },
        "train": {"prompts_per_step": 4, "max_steps": 3, "dir": str(directory / "runs"), "name": name},
        "checkpoint": {"every_steps": 2},
        "plugins": {
            "null": null,
            "critic_engine": {"backend": "null"},
            "agent_loop": {
                "tools": {"same": {"fn": f"{directory / 'files.py'}:same"}},
                "parser": f"{directory / 'files.py'}:always",
                "describe_tools": "never",
                "max_turns": 3,
                "turn_tokens": 8,
            },
            "reward_loop": {
                "rewards": {
                    "helpful": {"served_by": "scorer"},
                    "liked": {"served_by": "scorer", "normalise": True},
                },
                "services": {"scorer": {"urls": [f"{url}/score"]}},
            },
        },
    }


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [row for row in metrics.read(run) if "step" in row]


def test_what_a_clock_measures_is_named_time_and_all_else_repeats(tmp_path: Path) -> None:
    (tmp_path / "files.py").write_text(FILES)
    write_prompts(tmp_path / "prompts.jsonl", 20)
    delay_s = 0.0

    def score(call: ServiceCall) -> ServiceAnswer:
        return ServiceAnswer({"score": share(json.dumps(call.json()["completion"]))}, after_s=delay_s)

    with serving(score) as service:
        fast = train(config(tmp_path, "fast", service.url, {}), plugins=PLUGINS).run_dir
        delay_s = 0.05
        delays = {"token_s": 0.002, "update_s": 0.1, "logprobs_s": 0.05, "setup_s": 0.2}
        slow = train(config(tmp_path, "slow", service.url, delays), plugins=PLUGINS).run_dir
    names = {name for row in rows_of(fast) + rows_of(slow) for name in row}
    rooms = {"reward", "agent", "critic", "actor", "schedule", "data", "time"}
    assert rooms <= {name.split("/")[0] for name in names}
    assert "time/reward/helpful/latency_p95_s" in names
    assert "time/loop_blocked_s" in names
    assert sorted(name for name in names if not name.startswith(CLOCK) and OF_A_CLOCK.search(name)) == []
    varying = {
        name
        for left, right in zip(rows_of(fast), rows_of(slow), strict=True)
        for name in left.keys() | right.keys()
        if left.get(name) != right.get(name)
    }
    assert (
        sorted(name for name in varying if not name.startswith((CLOCK, "_")) and not name.endswith(VARYING_ENDS)) == []
    )
    assert differing(fast, slow) == []
