"""Parsers of tool calls."""

import json
from typing import Any

import pytest
from rlcore_agent_loop.testing import HELLO, Ask, says, served
from rlcore_agent_loop.tools.calls import ToolCall
from rlcore_agent_loop.tools.parsers import MAX_PARSED_CHARS, hermes, llama3_json, pythonic
from rlcore_agent_loop.tools.schemas import typed

ADD = ToolCall("add", {"a": 1, "b": 2})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>', [ADD]),
        ('so: <tool_call>{"name": "now"}</tool_call> and', [ToolCall("now", {})]),
        (
            "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>\n"
            "</tool_call>",
            [ADD],
        ),
        (
            "<tool_call><function=say><parameter=text>\ntwo\nlines\n</parameter></function></tool_call>",
            [ToolCall("say", {"text": "two\nlines"})],
        ),
        (
            '<tool_call>\n{"name": "write", "arguments": {"html": "<function=x></function>"}}</tool_call>',
            [ToolCall("write", {"html": "<function=x></function>"})],
        ),
        ('<tool_call>{"name": "add"', []),
        ("no call", []),
    ],
)
def test_hermes_reads_json_and_xml_between_tags(text: str, expected: list[ToolCall]) -> None:
    assert hermes(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"name": "add", "parameters": {"a": 1, "b": 2}}', [ADD]),
        ('<|python_tag|>{"name": "now", "parameters": {}}; {"name": "add", "arguments": {"a": 1, "b": 2}}',
         [ToolCall("now", {}), ADD]),
        ('I think {"name": "add"}', []),
    ],
)  # fmt: skip
def test_llama3_json_reads_a_turn_that_is_objects(text: str, expected: list[ToolCall]) -> None:
    assert llama3_json(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[add(a=1, b=2)]", [ADD]),
        ("add(a=1, b=2)", [ADD]),
        ("[a.b(x=[1, {'y': None}]), now()]", [ToolCall("a.b", {"x": [1, {"y": None}]}), ToolCall("now", {})]),
        ("The sum is add(a=1, b=2)", []),
        ("", []),
    ],
)
def test_pythonic_reads_a_turn_that_is_calls(text: str, expected: list[ToolCall]) -> None:
    assert pythonic(text) == expected


@pytest.mark.parametrize(
    ("parse", "text", "problem"),
    [
        (hermes, "<tool_call>[" + "[" * 5000 + "</tool_call>", "the call is not JSON"),
        (hermes, '<tool_call>{"name": 3}</tool_call>', "the call has no name"),
        (hermes, "<tool_call><function=></tool_call>", "the call has no name"),
        (llama3_json, '{"name": "add", ', "the call is not JSON"),
        (llama3_json, '{"parameters": {}}', "the call has no name"),
        (llama3_json, '{"name": "add", "parameters": [1]}', "the arguments are not an object"),
        (pythonic, "[add(1, 2)]", "arguments without a name"),
        (pythonic, "[add(**x)]", "arguments without a name"),
        (pythonic, "[add(a=open('x'))]", "an argument is not a literal"),
        (pythonic, "add(a=1))", "the call is not Python: SyntaxError"),
        (pythonic, "add(a=" + "(" * 500 + ")", "the call is not Python"),
        (pythonic, "add(a='" + "x" * MAX_PARSED_CHARS + "')", "at most"),
        (pythonic, "[add(a=1), 5]", "the call is not a call"),
        (pythonic, "[add(a=0x" + "f" * 5000 + ")]", "an argument is not a literal"),
    ],
)
def test_what_cannot_be_called_says_why(parse: object, text: str, problem: str) -> None:
    found = parse(text)  # type: ignore[operator]
    assert problem in found[-1].problem


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parse", "text", "num_calls"),
    [
        (hermes, "<tool_call>" * 500_000, 0),
        (hermes, "<tool_call>" + "<function=" * 500_000 + "</tool_call>", 1),
        (hermes, "<tool_call><function=add>" + "<parameter=a>" * 500_000 + "</tool_call>", 1),
        (hermes, "<tool_call><function=add>" + "<parameter=" * 500_000 + "</tool_call>", 1),
        (llama3_json, "{};" * 300_000, 300_000),
    ],
    ids=["calls", "functions", "parameters", "names", "objects"],
)
def test_tags_that_a_policy_repeats_without_end_take_linear_time(parse: object, text: str, num_calls: int) -> None:
    """Quadratic time would take hours."""
    assert len(parse(text)) == num_calls  # type: ignore[operator]


def test_a_parameter_that_is_not_closed_leaves_the_others() -> None:
    text = "<tool_call><function=add><parameter=a>1</parameter><parameter=b>2</function></tool_call>"
    assert hermes(text) == [ToolCall("add", {"a": 1})]


def xml(name: str, **parameters: str) -> str:
    written = "".join(f"<parameter={name}>\n{text}\n</parameter>\n" for name, text in parameters.items())
    return f"<tool_call>\n<function={name}>\n{written}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"type": "string"}, "2024", "2024"),
        ({"type": "string"}, '{"a": 1}', '{"a": 1}'),
        ({"type": "string"}, "true", "true"),
        ({"type": "string"}, '"quoted"', '"quoted"'),
        ({"type": "integer"}, "2024", 2024),
        ({"type": "object"}, '{"a": 1}', {"a": 1}),
        ({"type": "string", "nullable": True}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "2024", "2024"),
        ({"type": ["string", "number"]}, "2024", 2024),
        ({"$ref": "#/x"}, "2024", 2024),
        ({"type": 3, "anyOf": {}}, "2024", 2024),
        (None, "2024", 2024),
    ],
)
def test_an_argument_of_qwens_xml_is_text_where_its_schema_has_a_string(schema: Any, text: str, expected: Any) -> None:
    [call] = hermes(xml("write", path=text))
    described = {"function": {"name": "write", "parameters": {"properties": {"path": schema}}}}
    assert typed(call, [None, {"function": {"name": "other"}}, described]).arguments == {"path": expected}


def test_arguments_in_json_stay_as_they_are() -> None:
    [call] = hermes('<tool_call>{"name": "write", "arguments": {"path": 2024}}</tool_call>')
    described = {"function": {"name": "write", "parameters": {"properties": {"path": {"type": "string"}}}}}
    assert typed(call, [described]).arguments == {"path": 2024}


def test_an_agent_gets_the_arguments_of_qwens_xml_as_its_own_schemas_have_them() -> None:
    described = {
        "type": "function",
        "function": {
            "name": "write",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}, "size": {"type": "integer"}}},
        },
    }

    async def work(ask: Ask) -> None:
        _, found = await ask({**HELLO, "tools": [described]})
        [made] = found["choices"][0]["message"]["tool_calls"]
        assert json.loads(made["function"]["arguments"]) == {"path": "2024", "size": 7}

    served(says("-", xml("write", path="2024", size="7")), work)
