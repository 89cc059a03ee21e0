"""Running calls of tools and environments are reported to the run: `rlcore where` and the trace show them."""

import asyncio
import json
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rlcore_agent_loop import Environment, Step
from rlcore_agent_loop.settings import AgentLoopSettings, AgentSettings, EnvironmentSettings
from rlcore_agent_loop.testing import END, ScriptedPolicy, talk
from rlcore_agent_loop.tools.calls import ToolCall
from rlcore_agent_loop.tools.tools import SampleTools

from rlcore.contracts.activity import TOOL, Activity, as_current, current_activity
from rlcore.errors import ChildError
from rlcore.types import Message, Prompt, TrajectoryId

ROW = TrajectoryId("p/0", 0, 1)


class Source:
    """A source of tools of which one works and one fails."""

    def __init__(self, activity: Activity) -> None:
        self.activity = activity
        self.open_work: list[tuple[str, str]] = []

    async def call(self, name: str, sample: str, columns: Mapping[str, Any], arguments: Mapping[str, Any]) -> str:
        self.open_work += [(work.kind, work.who) for work in self.activity.open_work()]
        if name == "broken":
            raise ChildError("it broke")
        return "found"


def test_a_tool_call_is_work_in_progress_until_it_ends_also_by_an_error() -> None:
    activity = Activity("all")
    source = Source(activity)
    with as_current(activity):
        tools = SampleTools("p/0/0/1", {}, {"search": source, "broken": source}, [], ROW)  # type: ignore[dict-item]
        calls = [ToolCall("search", {}), ToolCall("broken", {})]
        results = [asyncio.run(tools.results([call], 1, 100)) for call in calls]
    assert results == [["found"], ["error: it broke"]]
    assert source.open_work == [(TOOL, "search"), (TOOL, "broken")]
    assert activity.open_work() == []
    assert [(span.work.who, span.work.what, span.work.sample) for span in activity.take().spans()] == [
        ("search", "", ROW),
        ("broken", "", ROW),
    ]


class Counting(Environment):
    """Ends a sample after its second turn, and records the work in progress."""

    seen: ClassVar[list[tuple[str, str, str, TrajectoryId | None, int]]] = []

    async def reset(self, prompt: Prompt, seed: int) -> Any:
        self.turns = 0
        self.look()
        return prompt.messages

    async def step(self, messages: Sequence[Message]) -> Step:
        self.turns += 1
        self.look()
        return Step([{"role": "user", "content": "go on"}], done=self.turns == 2)

    def look(self) -> None:
        self.seen.extend(tuple(work[:5]) for work in current_activity().open_work())


def test_an_environment_is_work_in_progress_while_it_resets_and_steps() -> None:
    activity = Activity("all")
    settings = AgentLoopSettings(environment=EnvironmentSettings(f"{__file__}:Counting"), children=1)
    with as_current(activity):
        [trajectory] = talk(ScriptedPolicy(lambda sample, turn, ids: [*b"yes", END]), settings).trajectories
    row = trajectory.id
    found = [("environment", "Counting", method, row) for method in ("reset", "step", "step")]
    assert activity.open_work() == []
    assert [tuple(span.work[:4]) for span in activity.take().spans()] == found


def solve(base_url: str, api_key: str, messages: list[Any]) -> float:
    """An agent of two requests."""
    for _ in range(2):
        body = json.dumps({"model": "policy", "messages": messages}).encode()
        headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(f"{base_url}/chat/completions", body, headers)) as response:
            reply = json.load(response)["choices"][0]["message"]
        messages = [*messages, reply, {"role": "user", "content": "more"}]
    return 1.0


def test_an_agent_is_work_in_progress_except_while_the_policy_answers_it() -> None:
    activity = Activity("all")
    sampling: list[list[str]] = []

    def script(sample: int, turn: int, ids: Sequence[int]) -> list[int]:
        sampling.append([work.kind for work in activity.open_work()])
        return [*b"yes", END]

    settings = AgentLoopSettings(agent=AgentSettings(f"{__file__}:solve", children=1))
    with as_current(activity):
        [trajectory] = talk(ScriptedPolicy(script), settings, processes=True).trajectories
    assert (trajectory.turns, sampling) == (2, [[], []])
    assert activity.open_work() == []
    found = [("agent", "solve", "", trajectory.id)] * 3  # before the first request, between them, after the second
    assert [tuple(span.work[:4]) for span in activity.take().spans()] == found
