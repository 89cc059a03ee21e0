"""Agents that talk to the policy through an OpenAI-compatible endpoint."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rlcore_agent_loop.agents.endpoint import Endpoint
from rlcore_agent_loop.agents.program import Program
from rlcore_agent_loop.checks import check_settings
from rlcore_agent_loop.rewards import environment
from rlcore_agent_loop.settings import AgentLoopSettings, AgentSettings, ToolSettings
from rlcore_agent_loop.testing import END, HELLO, Ask, ScriptedPolicy, call, contents, says, served, talk

from rlcore.config import RunConfig
from rlcore.errors import ConfigError
from rlcore.types import ROLLOUT_ERROR, FinishReason


def test_messages_that_extend_the_recorded_ones_continue_their_tokens() -> None:
    async def work(ask: Ask) -> None:
        status, first = await ask({**HELLO, "temperature": 0})
        reply = first["choices"][0]["message"]
        assert (status, reply["content"], first["choices"][0]["finish_reason"]) == (200, "one", "stop")
        _, second = await ask({"messages": [*HELLO["messages"], reply, {"role": "user", "content": "more"}]})
        assert second["choices"][0]["message"]["content"] == "two"
        assert second["usage"]["completion_tokens"] == 4

    recording = served(says("one", "one", "two"), work)
    [found] = recording.episode.trajectories()
    opening, between = b"user: hello\nassistant: ", b"\nuser: more\nassistant: "
    assert found.token_ids.tolist() == [*opening, *b"one", END, *between, *b"two", END]
    assert found.token_ids[found.loss_mask].tolist() == [*b"one", END, *b"two", END]
    assert found.logprobs[found.loss_mask].tolist() == [-float(place) for place in found.loss_mask.nonzero()[0]]
    assert contents(found) == [("assistant", "one"), ("user", "more"), ("assistant", "two")]
    assert recording.overridden == {"temperature"}


@pytest.mark.parametrize(
    "changed",
    [
        [{"role": "user", "content": "hallo"}, {"role": "assistant", "content": "one"}],
        [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "One"}],
        [{"role": "user", "content": "hello"}],
    ],
    ids=["an edited question", "an edited answer", "a dropped answer"],
)
def test_messages_that_do_not_extend_the_recorded_ones_begin_a_part(changed: list[dict[str, str]]) -> None:
    async def work(ask: Ask) -> None:
        await ask(HELLO)
        await ask({"messages": [*changed, {"role": "user", "content": "more"}]})

    parts = served(says("one", "one", "two"), work).episode.trajectories()
    more = {"role": "user", "content": "more"}
    assert [part.prompt_messages for part in parts] == [tuple(HELLO["messages"]), (*changed, more)]
    assert [(part.id.segment, part.num_segments, part.num_sampled) for part in parts] == [(0, 2, 4), (1, 2, 4)]


def test_a_call_is_answered_as_the_protocol_has_it_and_its_result_extends_the_tokens() -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]

    async def work(ask: Ask) -> None:
        _, first = await ask({**HELLO, "tools": tools})
        reply = first["choices"][0]["message"]
        assert first["choices"][0]["finish_reason"] == "tool_calls"
        assert reply["content"] is None
        [made] = reply["tool_calls"]
        assert (made["function"]["name"], json.loads(made["function"]["arguments"])) == ("add", {"a": 1})
        result = {"role": "tool", "tool_call_id": made["id"], "content": [{"type": "text", "text": "2"}]}
        await ask({"messages": [*HELLO["messages"], reply, result], "tools": tools})

    [found] = served(says("-", call("add", a=1), "2"), work).episode.trajectories()
    assert found.token_ids[found.loss_mask].tolist() == [*call("add", a=1).encode(), END, *b"2", END]


def test_a_stream_brings_the_whole_answer_in_one_chunk() -> None:
    async def work(ask: Ask) -> None:
        status, found = await ask({**HELLO, "stream": True})
        first, last = [line.removeprefix("data: ") for line in found["text"].strip().split("\n\n")]
        assert (status, last) == (200, "[DONE]")
        assert json.loads(first)["choices"][0]["delta"]["content"] == "one"

    served(says("-", "one"), work)


def test_case_40_a_token_is_needed_and_two_paths_exist() -> None:
    async def work(ask: Ask) -> None:
        for token in ("", "0", "0.", "0.wrong", "1.x", "é.é", "0.\udcff"):
            status, found = await ask(HELLO, token=token)
            assert (status, found["error"]["code"]) == (401, "invalid_api_key")
        assert (await ask(None, path="/models", method="GET"))[1]["data"][0]["id"] == "policy"
        for path in ("/completions", "/models/policy", "/../etc/passwd", "/chat/completions/"):
            assert (await ask(HELLO, path=path))[0] == 404
        assert (await ask(None, method="GET"))[0] == 405

    assert served(says("-"), work).episode.segments == []


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ([], "the body is not an object"),
        ({}, "messages: needs a list"),
        ({"messages": [{"content": "x"}]}, "each needs a role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "other than text"),
        ({**HELLO, "n": 2}, "n=2: one choice is served"),
        ({**HELLO, "max_tokens": 0.5}, "max_tokens: needs a number"),
        ({**HELLO, "stop": [1]}, "stop: needs"),
        ({**HELLO, "tools": "add"}, "tools: needs a list"),
        ({"messages": [{"role": "user", "content": "x" * 300}]}, "has used its tokens"),
    ],
)
def test_a_request_that_cannot_be_answered_gets_the_reason(body: Any, expected: str) -> None:
    async def work(ask: Ask) -> None:
        status, found = await ask(body)
        assert status == 400
        assert expected in found["error"]["message"]

    served(says("-", "one"), work, context_tokens=200)


def test_the_turns_of_a_sample_are_bounded() -> None:
    async def work(ask: Ask) -> None:
        assert [(await ask(HELLO))[0] for _ in range(3)] == [200, 200, 400]

    assert served(ScriptedPolicy(lambda *_: [END]), work, max_turns=2).episode.ended_by == "max_turns"


AGENTS = """
import json, os, time, urllib.error, urllib.request

def ask(base_url, api_key, messages):
    body = json.dumps({"messages": messages}).encode()
    request = urllib.request.Request(base_url + "/chat/completions", body, {"Authorization": "Bearer " + api_key})
    with urllib.request.urlopen(request, timeout=20) as response:
        return json.load(response)["choices"][0]["message"]

def twice(base_url, api_key, question, bonus=0.0):
    messages = [{"role": "user", "content": question}]
    messages.append(ask(base_url, api_key, messages))
    messages.append({"role": "user", "content": "again"})
    return float(ask(base_url, api_key, messages)["content"] == "two") + bonus

async def coroutine(base_url, api_key, messages):
    return ask(base_url, api_key, messages)["content"]

def unchanged(question):
    messages = [{"role": "user", "content": question}]
    return ask(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], messages)["content"]

def silent(base_url, api_key):
    return None

def raises(base_url, api_key, messages):
    ask(base_url, api_key, messages)
    raise KeyError("agent")

def raises_when_refused(base_url, api_key, messages):
    try:
        while True:
            ask(base_url, api_key, messages)
    except urllib.error.HTTPError as error:
        error.close()
        raise ValueError("no answer") from None

def never_ends(base_url, api_key, messages):
    ask(base_url, api_key, messages)
    while True:
        try:
            ask(base_url, api_key, messages)
        except urllib.error.HTTPError as error:
            if error.code == 401:
                raise

def wants(base_url, api_key, secret):
    return None
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "agents.py").write_text(AGENTS)
    return tmp_path / "agents.py"


def with_agent(file: Path, name: str, threads: int = 4, **kwargs: Any) -> AgentLoopSettings:
    return AgentLoopSettings(agent=AgentSettings(f"{file}:{name}", kwargs=kwargs, children=1, threads=threads))


def two_turns(sample: int, turn: int, ids: tuple[int, ...]) -> list[int]:
    return [*(b"two" if b"again" in bytes(id_ for id_ in ids if id_ < END) else b"one"), END]


def test_an_agent_makes_samples_and_its_reward_is_the_environments(file: Path) -> None:
    settings = with_agent(file, "twice", bonus=0.5)
    talked = talk(ScriptedPolicy(two_turns), settings, num_samples=6)
    assert len(talked.trajectories) == 6
    for trajectory in talked.trajectories:
        assert (trajectory.turns, trajectory.num_segments, environment(trajectory)) == (2, 1, 1.5)
        assert trajectory.token_ids[trajectory.loss_mask].tolist() == [*b"one", END, *b"two", END]
    assert talked.metrics["agent/ended/agent_frac"] == 1.0
    assert talked.metrics["agent/num_new_parts"] == 0.0


@pytest.mark.parametrize(("name", "threads"), [("coroutine", 4), ("unchanged", 1)])
def test_an_agent_may_be_a_coroutine_or_find_the_endpoint_in_its_environment(
    name: str, threads: int, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("OPENAI_BASE_URL", "OPENAI_API_KEY"):
        monkeypatch.setenv(variable, "")  # put back afterwards: here the agent runs in this process
    found = talk(ScriptedPolicy(two_turns), with_agent(file, name, threads)).only
    assert found.info["result"] == "one"


def test_an_agent_that_never_asks_is_a_sample_without_tokens_to_train(file: Path) -> None:
    found = talk(says("one"), with_agent(file, "silent")).only
    assert (found.num_sampled, found.turns, found.info["ended_by"]) == (0, 0, "agent")


def test_an_agent_that_raises_leaves_what_was_recorded(file: Path) -> None:
    found = talk(ScriptedPolicy(two_turns), with_agent(file, "raises")).only
    assert (found.num_sampled, found.info["ended_by"]) == (4, "agent_failed")
    assert "KeyError: 'agent'" in str(found.info["error"])
    assert found.info[ROLLOUT_ERROR] == f"agent failed: {found.info['error']}"


def test_an_agent_that_raises_at_a_limit_leaves_a_sample_that_is_scored(file: Path) -> None:
    found = talk(ScriptedPolicy(two_turns), replace(with_agent(file, "raises_when_refused"), max_turns=1)).only
    assert (found.info["ended_by"], ROLLOUT_ERROR in found.info) == ("max_turns", False)
    assert "ValueError: no answer" in str(found.info["error"])


@pytest.mark.fault
def test_an_agent_that_never_ends_is_ended_and_its_token_is_worth_nothing(file: Path) -> None:
    settings = replace(with_agent(file, "never_ends"), time_s=0.4)
    parts = talk(ScriptedPolicy(two_turns, seconds=0.05), settings, processes=True).trajectories
    assert {part.info["ended_by"] for part in parts} == {"time_s"}
    assert parts[-1].finish is FinishReason.LENGTH
    assert [part.num_sampled for part in parts] == [4] * len(parts)


def test_what_an_agent_cannot_be_given_is_an_error(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs secret; given are base_url"):
        Program(f"{file}:wants", {}, alone=False)
    with pytest.raises(ConfigError, match=r"takes no base_url and api_key; needs both, or .*threads=1"):
        Program(f"{file}:unchanged", {}, alone=False)


def test_an_agents_class_that_cannot_be_made_is_named_with_its_keys(file: Path) -> None:
    file.write_text("class Agent:\n    def __init__(self, k): ...\n    def __call__(self, base_url, api_key): ...\n")
    why = r"agent\.fn: .*agents\.py:Agent, made with plugins\.agent_loop\.agent\.kwargs: TypeError: .* argument: 'k'"
    with pytest.raises(ConfigError, match=rf"^plugins\.agent_loop\.{why}$"):
        Program(f"{file}:Agent", {}, alone=False)


def test_tools_in_addition_to_an_agent_are_an_error(file: Path) -> None:
    settings = replace(with_agent(file, "twice"), tools={"add": ToolSettings("x:y")})
    with pytest.raises(ConfigError, match=r"has no effect with plugins\.agent_loop\.agent\.fn"):
        check_settings(RunConfig(), settings)


def test_concurrent_endpoints_have_different_ports() -> None:
    async def both() -> list[str]:
        endpoints = [Endpoint(), Endpoint()]
        try:
            for endpoint in endpoints:
                await endpoint.start()
            return [endpoint.url for endpoint in endpoints]
        finally:
            for endpoint in endpoints:
                await endpoint.close()

    first, second = asyncio.run(both())
    assert first != second
