"""Environments of verifiers that do what none should: the sample fails and says why, and the next one works.

The package itself is a stand-in here, whose environments are attacks.
"""

import json
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rlcore_agent_loop.agents.program import MAX_CHARS, Program
from rlcore_agent_loop.verifiers import COLUMN, Verifiers

from rlcore.errors import ChildError, ConfigError

PACKAGE = {
    "verifiers/__init__.py": "def load_environment(name): raise SystemExit(0)\n",
    "verifiers/legacy/__init__.py": "",
    "verifiers/legacy/clients.py": "class OpenAIChatCompletionsClient:\n    def __init__(self, client): ...\n",
    "openai.py": """
class AsyncOpenAI:
    def __init__(self, **given): ...
    async def __aenter__(self): return self
    async def __aexit__(self, *ended): ...
""",
}
STAND_INS = ("verifiers", "openai")
WORLD = """
import asyncio

class Interrupts(KeyboardInterrupt): ...
class Bare(BaseException): ...
class Mute(Exception):
    def __str__(self): raise ValueError("mute")

class World:
    requires_group_rollouts = False

    {kind} run_rollout({parameters}):
        if row.get("good"):
            return {"error": None, "reward": 0.5}
        {attack}

def load(): return World()
"""


@pytest.fixture
def verifiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Verifiers]]:
    """Makes an agent whose environment is this attack."""
    for name, text in PACKAGE.items():
        (tmp_path / "site" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "site" / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in STAND_INS}
    made: list[Verifiers] = []

    def make(attack: str, parameters: str = "self, row, client, model, sampling", kind: str = "async def") -> Verifiers:
        text = WORLD.replace("{attack}", attack).replace("{parameters}", parameters).replace("{kind}", kind)
        (tmp_path / "world.py").write_text(text)
        made.append(Verifiers(f"{tmp_path / 'world.py'}:load"))
        return made[-1]

    yield make
    for agent in made:
        agent._loop.call_soon_threadsafe(agent._loop.stop)
    for thread in [thread for thread in threading.enumerate() if thread.name == "verifiers"]:
        thread.join(5.0)
    for agent in made:
        agent._loop.close()
    for name in list(sys.modules):
        if name.partition(".")[0] in STAND_INS:
            del sys.modules[name]
    sys.modules.update(kept)


def reward_of(agent: Verifiers, row: Any) -> float:
    return agent("http://127.0.0.1", "key", "policy", {COLUMN: row if isinstance(row, str) else json.dumps(row)})


RUNS = {
    "return None": "gave NoneType; needs a state with error and reward",
    "return 1.0": "gave float",
    "return {}": "gave dict; needs a state",
    "return {'reward': 1.0}": "gave dict",
    "return {'error': None, 'reward': None}": "the reward None; needs a finite number",
    "return {'error': None, 'reward': '0.5'}": "the reward '0.5'",
    "return {'error': None, 'reward': [1.0]}": "the reward [1.0]",
    "return {'error': None, 'reward': float('nan')}": "the reward nan",
    "return {'error': None, 'reward': float('-inf')}": "the reward -inf",
    "return {'error': None, 'reward': 1e39}": "the reward 1e+39",
    "return {'error': None, 'reward': 10**400}": "the reward 1000",
    "return {'error': None, 'reward': 1j}": "the reward 1j",
    "return {'error': 'x' * 10**8, 'reward': 1.0}": "failed: 'xxx",
    "return {'error': ValueError('no'), 'reward': 1.0}": "failed: ValueError: no",
    "return {'error': Mute(), 'reward': 1.0}": "failed: Mute",
    "raise ValueError('\\n\\x1b[2Jtwo lines')": "ValueError",
    "raise Mute": "Mute",
    "raise SystemExit(0)": "sys.exit(0)",
    "raise KeyboardInterrupt": "KeyboardInterrupt",
    "raise Interrupts": "Interrupts",
    "raise Bare('x')": "Bare: x",
    "raise GeneratorExit": "GeneratorExit",
    "raise StopAsyncIteration": "StopAsyncIteration",
    "raise asyncio.CancelledError": "CancelledError",
    "raise BaseExceptionGroup('x', [SystemExit(0)])": "BaseExceptionGroup",
    "asyncio.current_task().cancel(); await asyncio.sleep(1)": "CancelledError",
    "raise TimeoutError": "TimeoutError",
}


@pytest.mark.slow
@pytest.mark.timeout(20)
@pytest.mark.parametrize("attack", RUNS)
def test_a_rollout_that_goes_wrong_fails_its_sample_in_one_line_and_the_next_works(
    verifiers: Callable[..., Verifiers], attack: str
) -> None:
    agent = verifiers(attack)
    with pytest.raises(ChildError) as caught:
        reward_of(agent, {"good": False})
    message = str(caught.value)
    assert RUNS[attack] in message
    assert "run_rollout()" in message
    assert "\n" not in message
    assert len(message) < 400
    assert reward_of(agent, {"good": True}) == 0.5


def test_a_rollout_that_is_not_a_coroutine_fails_its_sample(verifiers: Callable[..., Verifiers]) -> None:
    agent = verifiers("return {}", kind="def")
    with pytest.raises(ChildError, match=r"run_rollout\(\) returned dict at once; needs an async def$"):
        reward_of(agent, {})


@pytest.mark.parametrize("row", ["", "no json", "3", "[1]", "null", "[" * 100_000])
def test_a_row_that_is_not_an_object_fails_its_sample(verifiers: Callable[..., Verifiers], row: str) -> None:
    agent = verifiers("return {}")
    with pytest.raises(ChildError, match=r"^the column 'verifiers' holds '.*needs a JSON object") as caught:
        reward_of(agent, row)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "parameters", ["self", "self, row", "self, row, client, model, sampling, more", "self, *, row"]
)
def test_a_rollout_of_wrong_arity_is_refused_before_the_first_sample(
    verifiers: Callable[..., Verifiers], parameters: str
) -> None:
    with pytest.raises(ConfigError, match=r"world\.py:load': run_rollout\(\) takes other arguments \("):
        verifiers("return {}", parameters)


MADE = {
    "None": "found NoneType; needs an environment of verifiers",
    "'world'": "found str; needs",
    "type('W', (), {'requires_group_rollouts': False})()": "found W; needs",
    "type('W', (), {'requires_group_rollouts': False, 'run_rollout': 3})()": "found W; needs",
    "type('W', (), {'run_rollout': print})()": "found W; needs",
    "sys.exit(0)": "it called sys.exit(0)",
    "1 / 0": "ZeroDivisionError",
    "type('W', (World,), {'requires_group_rollouts': True})()": "judges the samples of a prompt together",
    "type('W', (World,), {'requires_group_rollouts': property(lambda self: sys.exit(0))})()": "it called sys.exit(0)",
}


@pytest.mark.parametrize("made", MADE)
def test_what_is_no_environment_is_refused_before_the_first_sample(
    verifiers: Callable[..., Verifiers], tmp_path: Path, made: str
) -> None:
    verifiers("return {}")
    file = tmp_path / "other.py"
    file.write_text(f"import sys\n{(tmp_path / 'world.py').read_text()}\ndef other(): return {made}\n")
    with pytest.raises(ConfigError) as caught:
        Verifiers(f"{file}:other")
    assert MADE[made] in str(caught.value)
    assert "other.py:other'" in str(caught.value)


def program(directory: Path, returned: str) -> Program:
    file = directory / "agents.py"
    file.write_text(f"def agent(base_url, api_key):\n    return {returned}\n")
    return Program(f"{file}:agent", {}, alone=False)


ENDPOINT = {"base_url": "http://127.0.0.1", "api_key": "x"}


@pytest.mark.parametrize("value", ["float('nan')", "float('inf')", "10**400", "1e39", "[1.0]", "{}", "b'x'", "object"])
def test_an_agent_that_gives_no_finite_reward_fails_its_sample(tmp_path: Path, value: str) -> None:
    with pytest.raises(ChildError, match=r"^the agent returned .*; needs a finite reward, a text or None$"):
        program(tmp_path, value).run(ENDPOINT)


@pytest.mark.parametrize("value", ["__import__('numpy').float32(0.5)", "0.5"])
def test_an_agent_may_give_its_reward_as_a_scalar_of_numpy(tmp_path: Path, value: str) -> None:
    found = program(tmp_path, value).run(ENDPOINT)
    assert (found, type(found)) == (0.5, float)


def test_the_text_of_an_agent_is_cut_and_can_be_encoded(tmp_path: Path) -> None:
    found = program(tmp_path, "'\\ud800' + 'x' * 10**7").run(ENDPOINT)
    assert isinstance(found, str)
    assert found.startswith("?xx")
    assert len(found) < MAX_CHARS + 100
