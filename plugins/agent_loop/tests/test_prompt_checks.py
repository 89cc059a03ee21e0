"""Prompts, templates and settings that cannot be served are refused before the first request."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rlcore_agent_loop.settings import AgentLoopSettings, AgentSettings, EnvironmentSettings, ToolSettings
from rlcore_agent_loop.testing import END, ScriptedPolicy, says, talk

from rlcore.data.tokenizer import ByteTokens
from rlcore.errors import ConfigError
from rlcore.plugins.planning import plan_run
from rlcore.report.metrics import read_trajectories
from rlcore.testing.rewards import make_prompt
from rlcore.train import train
from rlcore.types import FrozenDict, Prompt

TOOLS = """
def add(a: int, b: int) -> int:
    '''Adds two numbers.

    Args:
        a: The first.
        b: The second.
    '''
    return a + b

def silent(base_url, api_key):
    return None
"""


WORLD = """
from rlcore_agent_loop.conversation.environments import Environment

class World(Environment):
    def step(self, messages): ...
"""


@pytest.fixture
def settings(tmp_path: Path) -> AgentLoopSettings:
    (tmp_path / "tools.py").write_text(TOOLS)
    return AgentLoopSettings(tools={"add": ToolSettings(f"{tmp_path / 'tools.py'}:add")}, children=1)


def config_of(directory: Path, name: str) -> dict[str, Any]:
    """A run of one step with the rows of `rows.jsonl`."""
    return {
        "model": {"path": "", "tokenizer": "bytes"},
        "data": {"sources": {"train": {"path": str(directory / "rows.jsonl")}}, "shuffle": False},
        "rollout": {"backend": "null", "samples_per_prompt": 2, "max_tokens": 10},
        "actor": {"backend": "null"},
        "reward": {"functions": {"equal": {"fn": "exact_match"}}},
        "train": {"prompts_per_step": 1, "max_steps": 1, "dir": str(directory), "name": name},
    }


def long_prompt(index: int, num: int) -> Prompt:
    return replace(make_prompt(index), messages=(FrozenDict({"role": "user", "content": "x" * num}),))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_prompt_that_leaves_no_room_is_refused_with_its_schemas_counted_before_anything_is_asked(
    settings: AgentLoopSettings, workers: int
) -> None:
    policy = says("Done.")
    bounded = replace(settings, context_tokens=500, max_conversations=1, workers=workers)
    long = long_prompt(1, 200)
    assert 200 < len(ByteTokens().encode_prompt(long.messages)) < 300
    with pytest.raises(ConfigError, match=r"'test/1' has \d{3} tokens, schemas of its tools included, and .* is 500"):
        talk(policy, bounded, prompts=[make_prompt(0), long])
    assert policy.requests == []
    assert len(talk(says("Done."), replace(bounded, describe_tools="never"), prompts=[long]).trajectories) == 1


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_prompts_that_are_too_long_with_their_schemas_are_left_out(
    settings: AgentLoopSettings, tmp_path: Path, workers: int, capsys: pytest.CaptureFixture[str]
) -> None:
    policy, messages = says("Done."), long_prompt(0, 10).messages
    talk(policy, settings, prompts=[long_prompt(0, 10)])
    longest = len(policy.requests[0].token_ids) + 20
    assert longest > len(ByteTokens().encode_prompt(messages)) + 100, "the schema has most of the tokens"
    uses = {10: ["add"], 60: ["add"], 61: []}
    rows = [{"question": "x" * num, "answer": "y", "uses": names} for num, names in uses.items()]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = {"tools": {"add": {"fn": settings.tools["add"].fn}}, "tools_column": "uses", "workers": workers}

    def sampled(name: str, **changes: str) -> set[str]:
        config = config_of(tmp_path, name) | {"plugins": {"agent_loop": section | changes}}
        config["data"]["max_prompt_tokens"] = longest
        config["train"]["max_steps"] = 3
        result = train(config, plugins=["null"])
        return {row["id"]["prompt"] for step in range(1, 4) for row in read_trajectories(result.run_dir, step)}

    assert sampled("shown") == {"train/0", "train/2"}
    left_out = (
        f"source 'train': 1 of 3 prompts are longer than {longest} tokens with the schemas of their tools: left out"
    )
    assert left_out in capsys.readouterr().out
    assert sampled("hidden", describe_tools="never") == {"train/0", "train/1", "train/2"}
    assert "left out" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("section", [{}, {"environment": {"fn": "worlds.py:World"}}], ids=["tools", "environment"])
def test_where_no_prompt_fits_with_its_schemas_they_are_named(
    settings: AgentLoopSettings, tmp_path: Path, section: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "worlds.py").write_text(WORLD)
    (tmp_path / "rows.jsonl").write_text('{"question": "x", "answer": "y"}\n')
    config = config_of(tmp_path, "run") | {
        "plugins": {"agent_loop": {"tools": {"add": {"fn": settings.tools["add"].fn}}} | section}
    }
    config["data"]["max_prompt_tokens"] = 100
    needed = (
        r"every prompt of source 'train' is longer than data\.max_prompt_tokens=100 with the schemas of their tools;"
    )
    with pytest.raises(ConfigError, match=needed):
        train(config, plugins=["null"])


@pytest.mark.parametrize("chosen", [0, 1000, 40])
def test_the_context_is_never_larger_than_the_engines_window(settings: AgentLoopSettings, chosen: int) -> None:
    plain = replace(settings, describe_tools="never", context_tokens=chosen)
    found = talk(ScriptedPolicy(lambda *_: [*b"x" * 200, END]), plain, window=50).only
    assert len(found.token_ids) == min(chosen or 50, 50)
    with pytest.raises(ConfigError, match=r"the model window is 28: nothing could be sampled; lower data\.max_prompt"):
        talk(says("x"), replace(plain, context_tokens=1000), window=28)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_column_that_no_row_has_is_refused_and_its_absence_in_some_is_all_tools(
    settings: AgentLoopSettings, workers: int
) -> None:
    chosen = replace(settings, tools_column="usse", workers=workers)
    prompts = [make_prompt(0, uses=["add"]), make_prompt(1, uses=None)]
    with pytest.raises(ConfigError, match=r"tools_column: no row has a column 'usse'; did you mean 'uses'\?"):
        talk(says("Done."), chosen, prompts=prompts)
    found = talk(says("Done."), replace(chosen, tools_column="uses"), prompts=[*prompts, make_prompt(2)])
    assert len(found.trajectories) == 3


@pytest.mark.fault
def test_a_training_whose_later_prompt_does_not_fit_asks_for_nothing(
    settings: AgentLoopSettings, tmp_path: Path
) -> None:
    rows = [{"question": "x" * num, "answer": "y"} for num in (10, 400)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = config_of(tmp_path, "run") | {
        "plugins": {"agent_loop": {"tools": {"add": {"fn": f"{tmp_path / 'tools.py'}:add"}}, "context_tokens": 600}}
    }
    with pytest.raises(ConfigError, match=r"'train/1' has \d{3} tokens, schemas"):
        train(config, plugins=["null"])
    assert not (tmp_path / "run" / "trajectories").exists() or not list((tmp_path / "run" / "trajectories").iterdir())


class LastUser(ByteTokens):
    """A template that puts tools before the last message of a user."""

    def _render(self, messages, tools, *, opening):  # type: ignore[no-untyped-def]
        last = max(index for index, message in enumerate(messages) if message["role"] == "user")
        shown = "tools " + json.dumps(tools) if tools else ""
        lines = [
            f"{shown if index == last else ''}{message['role']}: {message['content']}\n"
            for index, message in enumerate(messages)
        ]
        return "".join([*lines, "assistant: " if opening else ""])


class NamesTools(ByteTokens):
    """A template that words a result otherwise when it tells about tools."""

    def _render(self, messages, tools, *, opening):  # type: ignore[no-untyped-def]
        text = super()._render(messages, tools, opening=opening)
        return text.replace("tool: y", "result: y") if tools else text


def test_a_template_that_moves_its_tools_behind_a_turn_is_refused_at_the_start(
    settings: AgentLoopSettings, tmp_path: Path
) -> None:
    (tmp_path / "worlds.py").write_text(WORLD)
    both = replace(settings, environment=EnvironmentSettings(f"{tmp_path / 'worlds.py'}:World"))
    with pytest.raises(ConfigError, match="the role 'user' breaks it: a message of this role changes"):
        talk(says("x"), both, tokens=LastUser())
    assert len(talk(says("x"), settings, tokens=LastUser()).trajectories) == 1, "results of tools do not move them"
    with pytest.raises(ConfigError, match=r"the role 'tool' breaks it: .* is written otherwise when there are tools"):
        talk(says("x"), settings, tokens=NamesTools())


class Forgets(ByteTokens):
    """A template that rewrites a conversation with a message of `role`."""

    role = "user"

    def _render(self, messages, tools, *, opening):  # type: ignore[no-untyped-def]
        text = super()._render(messages, tools, opening=opening)
        return f"again\n{text}" if messages[-1]["role"] == self.role and len(messages) > 1 else text


class ForgetsAtTools(Forgets):
    role = "tool"


def test_the_template_is_checked_for_agents_too(settings: AgentLoopSettings, caplog: pytest.LogCaptureFixture) -> None:
    fn = settings.tools["add"].fn.replace("add", "silent")
    agent = AgentLoopSettings(agent=AgentSettings(fn, children=1))
    with pytest.raises(ConfigError, match="the role 'user' breaks it"):
        talk(says("x"), agent, tokens=Forgets())
    talk(says("x"), agent, tokens=ForgetsAtTools())
    assert "the role 'tool' breaks it" in caplog.text
    caplog.clear()
    talk(says("x"), agent)
    assert "breaks it" not in caplog.text


@pytest.mark.parametrize(
    "ignored",
    ["children=1", "max_calls=2", "max_same_calls=2", "max_result_chars=5", "result_role=user", "describe_tools=never"],
)
def test_what_has_no_effect_on_an_agent_is_refused(ignored: str, settings: AgentLoopSettings) -> None:
    fn = settings.tools["add"].fn.replace("add", "silent")
    key = f"plugins.agent_loop.{ignored}"
    expected = f"{key.partition('=')[0]}: set to .* no effect: .*plugins.agent_loop.agent.fn"
    with pytest.raises(ConfigError, match=expected):
        plan_run([], [key, f"plugins.agent_loop.agent.fn={fn}", "model.path=x"], ["agent_loop"])
