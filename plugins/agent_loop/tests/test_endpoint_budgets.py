"""Token budgets of the run and of an agent's requests, and the end reason of its sample."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rlcore_agent_loop.agents.recording import Recording
from rlcore_agent_loop.settings import AgentLoopSettings, AgentSettings
from rlcore_agent_loop.testing import HELLO, Ask, says, served, talk

from rlcore.types import FinishReason

LONG = "x" * 1000


def ended(recording: Recording) -> tuple[str, FinishReason]:
    """The end reason of the sample, and the finish of its last trajectory."""
    return recording.episode.ended_by, recording.episode.trajectories()[-1].finish


@pytest.mark.parametrize(
    ("request_adds", "settings", "expected"),
    [
        ({}, {}, ("max_tokens", FinishReason.LENGTH)),
        ({"max_tokens": 500}, {}, ("max_tokens", FinishReason.LENGTH)),
        ({}, {"turn_tokens": 50}, ("turn_tokens", FinishReason.LENGTH)),
        ({"max_tokens": 50}, {}, ("agent", FinishReason.STOP)),
        ({"max_tokens": 20}, {"turn_tokens": 50}, ("agent", FinishReason.STOP)),
    ],
)
def test_a_turn_that_the_budget_of_the_run_cut_off_makes_its_sample_truncated(
    request_adds: Mapping[str, Any], settings: Mapping[str, Any], expected: tuple[str, FinishReason]
) -> None:
    async def work(ask: Ask) -> None:
        _, found = await ask({**HELLO, **request_adds})
        assert found["choices"][0]["finish_reason"] == "length"

    assert ended(served(says("-", LONG), work, **settings)) == expected


def test_a_sample_ends_as_its_last_part_does() -> None:
    async def work(ask: Ask) -> None:
        await ask(HELLO)
        await ask({"messages": [{"role": "user", "content": "shorter, please"}]})

    assert ended(served(says("-", LONG, "fine"), work)) == ("agent", FinishReason.STOP)
    assert ended(served(says("-", "fine", LONG), work)) == ("max_tokens", FinishReason.LENGTH)


def test_an_agent_that_recovers_from_a_refused_length_is_not_truncated() -> None:
    async def refused(ask: Ask) -> None:
        status, found = await ask({"messages": [{"role": "user", "content": "y" * 5000}]})
        assert (status, found["error"]["code"]) == (400, "context_length_exceeded")

    async def recovers(ask: Ask) -> None:
        await refused(ask)
        await ask(HELLO)

    async def gives_up(ask: Ask) -> None:
        await ask(HELLO)
        await refused(ask)

    assert ended(served(says("-", "fine"), recovers, context_tokens=1000)) == ("agent", FinishReason.STOP)
    assert ended(served(says("fine", "fine"), gives_up, context_tokens=1000)) == ("max_tokens", FinishReason.LENGTH)


AGENT = """
import json, urllib.request

def asks(base_url, api_key, messages):
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(base_url + "/chat/completions", body, headers)) as answer:
        json.load(answer)
"""


def test_an_agent_that_returns_after_a_cut_turn_made_a_truncated_sample(tmp_path: Path) -> None:
    file = tmp_path / "agents.py"
    file.write_text(AGENT)
    settings = AgentLoopSettings(agent=AgentSettings(fn=f"{file}:asks"))
    found = talk(says("-", LONG), settings, max_tokens=200)
    assert (found.only.info["ended_by"], found.only.finish) == ("max_tokens", FinishReason.LENGTH)
    assert found.metrics["agent/ended/max_tokens_frac"] == 1.0
