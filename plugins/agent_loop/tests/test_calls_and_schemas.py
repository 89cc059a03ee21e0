"""Calls whose arguments do not fit the tool's schema: the policy reads which one, and the tool is not called."""

from pathlib import Path

import pytest
from rlcore_agent_loop.settings import AgentLoopSettings, ToolSettings
from rlcore_agent_loop.testing import call, contents, says, talk

from rlcore.testing import ByteTokens

TOOLS = '''
from typing import Any, Literal, Optional

def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: One.
        b: Another.
    """
    return a + b

class Counter:
    def execute(self, by: int) -> int:
        """Counts.

        Args:
            by: How far.
        """
        return by

async def convert(
    of: float, unit: Literal["c", "f"] = "c", tags: list[str] = (), name: Optional[str] = "x", most: int = None,
    extra: Any = 1, either: int | str = 1,
) -> str:
    """Converts.

    Args:
        of: A value.
        unit: Its unit.
        tags: Words.
        name: A name.
        most: A limit.
        extra: Anything.
        either: A number or a text.
    """
    return repr((of, unit, tags, name, most, extra, either))

def open_to_all(**others: int) -> int:
    """Sums.

    Args:
        others: Any.
    """
    return sum(others.values())
'''
NAMES = ("add", "Counter", "convert", "open_to_all")
ANSWERS = {
    call("add", a=1): "error: add: the argument 'b' is missing; needs integer",
    call("add", a=1, b=2, bb=3): "error: add has no argument 'bb'; did you mean 'b'? choose from: a, b",
    call("add", a="1", b="2"): "error: add: the argument 'a' is '1'; needs integer",
    call("add", a=True, b=2): "error: add: the argument 'a' is True; needs integer",
    call("add", a=None, b=2): "error: add: the argument 'a' is None; needs integer",
    call("add", a=1.0, b=2): "3.0",
    call("Counter", by=[1]): "error: Counter: the argument 'by' is [1]; needs integer",
    call("Counter", by=2): "2",
    call("convert", of="hot"): "error: convert: the argument 'of' is 'hot'; needs number",
    call("convert", of=1, unit="k"): "error: convert: the argument 'unit' is 'k'; needs one of c, f",
    call("convert", of=1, tags="a"): "error: convert: the argument 'tags' is 'a'; needs array",
    call("convert", of=1, either=[]): "error: convert: the argument 'either' is []; needs integer or string",
    call("convert", of=1, name=None, most=None, extra={}, either="a"): "(1, 'c', (), None, None, {}, 'a')",
    call("open_to_all", a=1, b=2): "3",
}


def settings(directory: Path, describe: bool) -> AgentLoopSettings:
    (directory / "tools.py").write_text(TOOLS)
    tools = {name: ToolSettings(f"{directory / 'tools.py'}:{name}") for name in NAMES}
    return AgentLoopSettings(
        tools=tools, describe_tools="template" if describe else "never", children=1, max_calls=len(ANSWERS)
    )


class Describing(ByteTokens):
    """A template that names the tools."""

    def _render(self, messages, tools, *, opening):  # type: ignore[no-untyped-def]
        names = "".join(tool["function"]["name"] for tool in tools)
        return names + super()._render(messages, tools, opening=opening)


@pytest.mark.slow
def test_the_policy_reads_which_argument_does_not_fit_and_what_is_needed(tmp_path: Path) -> None:
    found = talk(says("".join(ANSWERS), "Done."), settings(tmp_path, describe=True), tokens=Describing()).only
    assert [text for role, text in contents(found) if role == "tool"] == list(ANSWERS.values())


def test_without_a_schema_the_tool_decides(tmp_path: Path) -> None:
    found = talk(says(call("add", a="1", b="2"), "Done."), settings(tmp_path, describe=False)).only
    assert contents(found)[1] == ("tool", "12")
