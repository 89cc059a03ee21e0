"""Agent loop and reward loop in one run: each trajectory is scored on its own. Neither knows of the other."""

import json
from pathlib import Path

import pytest

from rlcore.report import metrics
from rlcore.testing.service import ServiceAnswer, ServiceCall, serving
from rlcore.train import train

TOOL = """
import asyncio, time
from pathlib import Path

from rlcore_agent_loop.tools.calls import ToolCall


class Wait:
    def create(self, columns):
        self.slow = columns["slow"]

    async def execute(self):
        scored, deadline = Path(__file__).with_name("scored"), time.monotonic() + 20
        while self.slow and not scored.exists() and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        return "late" if self.slow and scored.exists() else "at once"


def always(text):
    return [ToolCall("wait", {})]
"""
# Half of all bytes end a turn of the null model.
STOPS = [chr(byte) for byte in range(128)]


@pytest.mark.slow
def test_a_conversation_is_scored_by_a_service_while_tools_of_others_still_work(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TOOL)
    rows = [{"question": f"Wait {index}?", "slow": index % 2 == 0} for index in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    seen: list[ServiceCall] = []

    def script(call: ServiceCall) -> ServiceAnswer:
        seen.append(call)
        if len(seen) >= 8:  # all quick ones: until then the slow ones wait
            (tmp_path / "scored").touch()
        results = [message["content"] for message in call.json()["completion"] if message["role"] == "tool"]
        return ServiceAnswer({"score": 1.0 if results == ["late"] else 0.25})

    config = {
        "model": {"path": "", "tokenizer": "bytes"},
        "data": {"sources": {"train": {"path": str(tmp_path / "rows.jsonl")}}},
        "rollout": {"backend": "null", "samples_per_prompt": 4, "max_tokens": 1000, "stop": STOPS},
        "actor": {"backend": "null"},
        "train": {"prompts_per_step": 4, "max_steps": 1, "dir": str(tmp_path), "name": "run"},
        "plugins": {
            "agent_loop": {
                "tools": {"wait": {"fn": f"{tmp_path / 'mine.py'}:Wait", "deadline_s": 30}},
                "parser": f"{tmp_path / 'mine.py'}:always",
                "describe_tools": "never",
                "max_turns": 2,
                "children": 1,
            },
            "reward_loop": {"rewards": {"helpful": {"served_by": "scorer"}}},
        },
    }
    with serving(script) as service:
        place = f"plugins.reward_loop.services.scorer.urls=[{service.url}/score]"
        result = train(config, place, plugins=["null", "reward_loop"])
    [step] = [row for row in metrics.read(result.run_dir) if "reward/mean" in row]
    bodies = [request.json() for request in service.calls]
    assert len({request["id"] for request in bodies}) == len(bodies) == 16
    slow = [request["columns"]["slow"] for request in bodies]
    assert slow == sorted(slow), "quick conversations are asked about first"
    assert step["reward/mean"] == (8 * 1.0 + 8 * 0.25) / 16
    assert step["agent/num_tool_calls"] == 16
