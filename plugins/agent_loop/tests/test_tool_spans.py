"""Tool calls under way are told to the run: `rlcore where` and the trace show them."""

import asyncio
from collections.abc import Mapping
from typing import Any

from rlcore_agent_loop.tools.calls import ToolCall
from rlcore_agent_loop.tools.tools import SampleTools

from rlcore.contracts.activity import TOOL, Activity, as_current
from rlcore.errors import ChildError


class Source:
    """A source of tools of which one works and one fails."""

    def __init__(self, activity: Activity) -> None:
        self.activity = activity
        self.under_way: list[tuple[str, str]] = []

    async def call(self, name: str, sample: str, columns: Mapping[str, Any], arguments: Mapping[str, Any]) -> str:
        self.under_way += [(work.kind, work.who) for work in self.activity.under_way()]
        if name == "broken":
            raise ChildError("it broke")
        return "found"


def test_a_tool_call_is_work_under_way_until_it_ends_also_by_an_error() -> None:
    activity = Activity("all")
    source = Source(activity)
    with as_current(activity):
        tools = SampleTools("p/0", {}, {"search": source, "broken": source}, [])  # type: ignore[dict-item]
        calls = [ToolCall("search", {}), ToolCall("broken", {})]
        results = [asyncio.run(tools.results([call], 1, 100)) for call in calls]
    assert results == [["found"], ["error: it broke"]]
    assert source.under_way == [(TOOL, "search"), (TOOL, "broken")]
    assert activity.under_way() == []
    assert [(span.work.who, span.work.what) for span in activity.take().spans()] == [
        ("search", "p/0"),
        ("broken", "p/0"),
    ]
