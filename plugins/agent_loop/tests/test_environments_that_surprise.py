"""Environments that do the unexpected: the sample ends and says why, and the run continues."""

from pathlib import Path
from typing import Any

import pytest
from rlcore_agent_loop.settings import AgentLoopSettings, EnvironmentSettings
from rlcore_agent_loop.testing import contents, says, talk

from rlcore.data.tokenizer import ByteTokens
from rlcore.report import metrics
from rlcore.train import train

ENVIRONMENTS = """
from pathlib import Path
from rlcore_agent_loop.conversation.environments import Environment, Step

def closed(self):
    Path(__file__).with_name("closed_" + type(self).__name__).touch()

class World(Environment):
    opening, answer = None, Step(done=True, reward=1.0)

    def reset(self, prompt, seed):
        if isinstance(self.opening, Exception):
            raise self.opening
        return self.opening or prompt.messages

    def step(self, messages):
        return self.answer

    def close(self):
        closed(self)

class ResetNone(World):
    def reset(self, prompt, seed):
        return None

class ResetText(World):
    opening = "hello"

class ResetRaises(World):
    opening = KeyError("closed")

class Texts(World):
    answer = Step(["again"])

class Number(World):
    answer = Step([{"role": "user", "content": 3}])

class Roleless(World):
    answer = Step([{"content": "x"}])

class Bare(World):
    answer = Step([{"role": "user"}])

class Nothing(World):
    answer = Step([{"role": "user", "content": None}])

class Image(World):
    answer = Step([{"role": "user", "content": [{"type": "text", "text": "See:"}, {"type": "image_url"}]}])

class Strings(World):
    opening = [{"role": "user", "content": ["hello"]}]

class Parts(World):
    opening = [{"role": "user", "content": [{"type": "text", "text": "Gu"}, {"type": "text", "text": "ess."}]}]

    def step(self, messages):
        if len(messages) > 2:
            return self.answer
        return Step([{"role": "user", "content": ({"type": "text", "text": "again"},)}])

class NoList(World):
    answer = Step("again")

class NoMapping(World):
    answer = Step(done=True, info=["x"])

class System(World):
    answer = Step([{"role": "system", "content": "x"}])

class CloseRaises(World):
    def close(self):
        closed(self)
        raise KeyError("door")

class Long(World):
    answer = Step([{"role": "user", "content": "x" * 500}], restart=True)

class LongOpening(World):
    opening = [{"role": "user", "content": "x" * 500}]

class Changes(World):
    def step(self, messages):
        if len(messages) > 2:
            return self.answer
        messages[-1]["content"] = "other"
        return Step([{"role": "user", "content": "again"}])

class Surrogate(World):
    opening = [{"role": "user", "content": "a\\ud800b"}]
    answer = Step([{"role": "user", "content": "c\\ud800d"}])

for name, cls in list(globals().items()):
    if isinstance(cls, type) and issubclass(cls, World):
        async def step(self, messages, sync=cls.step):
            return sync(self, messages)
        globals()["Async" + name] = type("Async" + name, (cls,), {"step": step})
"""


class OnlyUsers(ByteTokens):
    """A template that writes a conversation with a system message otherwise."""

    def _render(self, messages, tools, *, opening):  # type: ignore[no-untyped-def]
        text = super()._render(messages, tools, opening=opening)
        return f"system!\n{text}" if any(message["role"] == "system" for message in messages) else text


def settings_of(directory: Path, name: str) -> AgentLoopSettings:
    (directory / "worlds.py").write_text(ENVIRONMENTS)
    environment = EnvironmentSettings(f"{directory / 'worlds.py'}:{name}", deadline_s=5.0)
    return AgentLoopSettings(environment=environment, children=1, context_tokens=400)


FAILS = {
    "ResetNone": "environment.reset returned NoneType as messages; needs a list",
    "ResetText": "environment.reset returned str as messages; needs a list",
    "ResetRaises": "KeyError: 'closed'",
    "Texts": "environment.step returned the message 'again'; needs one with role and content",
    "Number": "environment.step returned a message whose content is int; needs text",
    "Roleless": "environment.step returned the message {'content': 'x'}; needs one with role",
    "Bare": "environment.step returned the message {'role': 'user'}; needs one with role and content",
    "Nothing": "environment.step returned a message whose content is NoneType; needs text",
    "Image": "environment.step returned a message with a part of type 'image_url'; needs parts of type text",
    "Strings": "environment.reset returned a message with a part of type 'str'; needs parts of type text",
    "NoList": "environment.step returned str as messages; needs a list",
    "NoMapping": "environment.step returned list as info; needs a mapping",
    "LongOpening": "environment.reset opened the conversation with 518 tokens, and the context has 400: nothing could",
    "System": "a message of the role 'system', which changes how the chat template",
}


@pytest.mark.parametrize("kind", ["", "Async"])
@pytest.mark.parametrize("name", FAILS)
def test_what_no_environment_may_return_fails_its_sample_and_it_is_closed(name: str, kind: str, tmp_path: Path) -> None:
    found = talk(says("one"), settings_of(tmp_path, kind + name), tokens=OnlyUsers()).only
    assert found.info["ended_by"] == "environment_failed"
    assert FAILS[name] in str(found.info["error"])
    assert (tmp_path / f"closed_{kind}{name}").exists()


@pytest.mark.parametrize("kind", ["", "Async"])
def test_text_parts_of_an_environment_are_shown_as_their_joined_text(kind: str, tmp_path: Path) -> None:
    policy = says("one", "two")
    found = talk(policy, settings_of(tmp_path, f"{kind}Parts")).only
    assert contents(found) == [("assistant", "one"), ("user", "again"), ("assistant", "two")]
    assert bytes(policy.requests[0].token_ids).decode() == "user: Guess.\nassistant: "


@pytest.mark.parametrize("kind", ["", "Async"])
def test_an_environment_that_changes_messages_does_not_change_what_is_recorded(kind: str, tmp_path: Path) -> None:
    found = talk(says("one", "two"), settings_of(tmp_path, f"{kind}Changes")).only
    assert contents(found) == [("assistant", "one"), ("user", "again"), ("assistant", "two")]


@pytest.mark.parametrize("kind", ["", "Async"])
def test_a_close_that_raises_is_logged(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = talk(says("one"), settings_of(tmp_path, f"{kind}CloseRaises")).only
    assert (found.info["ended_by"], found.info["environment_reward"]) == ("environment", 1.0)
    assert "KeyError: 'door'" in caplog.text


def test_a_new_conversation_that_is_too_long_ends_the_sample_as_cut_off(tmp_path: Path) -> None:
    found = talk(says("one"), settings_of(tmp_path, "Long")).only
    assert (found.info["ended_by"], found.num_segments, found.turns) == ("max_tokens", 1, 1)
    assert found.finish.value == "length"


@pytest.mark.parametrize("kind", ["", "Async"])
def test_what_no_tokenizer_encodes_is_replaced_in_messages(kind: str, tmp_path: Path) -> None:
    policy = says("one", "two", "three", "four")
    found = talk(policy, settings_of(tmp_path, f"{kind}Surrogate")).only
    assert contents(found)[1] == ("user", "c?d")
    assert bytes(policy.requests[0].token_ids).decode() == "user: a?b\nassistant: "


@pytest.mark.fault
def test_the_reward_of_an_environment_is_added_to_that_of_a_function(tmp_path: Path) -> None:
    settings_of(tmp_path, "World")
    (tmp_path / "rows.jsonl").write_text('{"question": "x"}\n{"question": "y"}\n')
    (tmp_path / "judge.py").write_text("def judge(trajectory):\n    return 0.5 * len(trajectory.completion)\n")
    game = {"fn": "environment", "weight": 4.0}
    config: dict[str, Any] = {
        "model": {"path": "", "tokenizer": "bytes"},
        "data": {"sources": {"train": {"path": str(tmp_path / "rows.jsonl")}}},
        "rollout": {"backend": "null", "samples_per_prompt": 2, "max_tokens": 1000, "stop": list(map(chr, range(128)))},
        "actor": {"backend": "null"},
        "reward": {"functions": {"game": game, "judge": {"fn": f"{tmp_path / 'judge.py'}:judge"}}},
        "train": {"prompts_per_step": 2, "max_steps": 1, "dir": str(tmp_path), "name": "run"},
        "plugins": {"agent_loop": {"environment": {"fn": f"{tmp_path / 'worlds.py'}:World"}, "children": 1}},
    }
    result = train(config, plugins=["null"])
    [step] = [row for row in metrics.read(result.run_dir) if "reward/mean" in row]
    assert step["agent/ended/environment_frac"] == 1.0
    assert step["reward/mean"] == 4.0 * 1.0 + 0.5
