"""Components behind the checks of what they hand over: their state and their scope."""

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlcore.errors import PluginError
from rlcore.runtime.checked_components import CheckedAgent, CheckedCritic, CheckedRewards
from rlcore.testing.rewards import make_prompt


@pytest.mark.parametrize("found", [None, [1], "text"])
def test_a_state_that_is_not_a_dict_and_a_scope_as_text_are_named(found: Any) -> None:
    class Odd:
        scope = weights = found

        def state(self) -> Any:
            return found

    with pytest.raises(PluginError, match=r"^reward 'r': state\(\) returned (NoneType|None|list|str); needs a dict"):
        CheckedRewards(Odd(), "reward 'r'").state()
    with pytest.raises(PluginError, match=r"^reward 'r': scope returned (None|list|str); needs a member of Scope"):
        CheckedRewards(Odd(), "reward 'r'").scope  # noqa: B018
    with pytest.raises(
        PluginError, match=r"^reward 'r': weights returned (None|list|str); needs a mapping of names to"
    ):
        CheckedRewards(Odd(), "reward 'r'").weights  # noqa: B018


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({1: 0.5}, "1: 0.5"),
        ({"f": "much"}, "'f': 'much'"),
        ({"f": None}, "'f': None"),
        ({"f": float("nan")}, "'f': nan"),
        ({"f": 1.0, "g": float("inf")}, "'g': inf"),
    ],
)
def test_weights_that_are_no_numbers_by_name_are_named(weights: Any, words: str) -> None:
    with pytest.raises(PluginError) as raised:
        CheckedRewards(SimpleNamespace(weights=weights), "reward 'r'").weights  # noqa: B018
    assert str(raised.value) == f"reward 'r': weights holds {words}; needs a mapping of names to finite numbers"
    right = SimpleNamespace(weights={"f": 2, "g": np.float32(0.5)})
    assert CheckedRewards(right, "reward 'r'").weights == {"f": 2.0, "g": 0.5}


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (None, "returned None; needs a list with a list of schemas for each prompt"),
        ([None, ()], "returned None; needs a list with a list of schemas for each prompt"),
        (["text", ()], "returned str; needs a list with a list of schemas for each prompt"),
        ([()], "returned 1 of 2 lists; needs one for each prompt"),
        ([(), ["add"]], "returned str; needs schemas that are dicts"),
    ],
)
def test_schemas_that_are_no_list_for_each_prompt_are_named(found: Any, words: str) -> None:
    class Odd:
        async def tool_schemas(self, prompts: Any) -> Any:
            return found

    class Late:
        def tool_schemas(self, prompts: Any) -> Any:
            return found

    prompts = [make_prompt(0), make_prompt(1)]
    with pytest.raises(PluginError) as raised:
        asyncio.run(CheckedAgent(Odd(), "agent loop 'x'").tool_schemas(prompts))
    assert str(raised.value) == f"agent loop 'x': tool_schemas() {words}"
    with pytest.raises(PluginError, match=r"needs an `async def`, which is awaited"):
        asyncio.run(CheckedAgent(Late(), "agent loop 'x'").tool_schemas(prompts))
    schema = {"type": "function", "function": {"name": "add"}}
    found = [(), (schema,)]
    assert asyncio.run(CheckedAgent(Odd(), "x").tool_schemas(prompts)) == [(), (schema,)]


class Failing:
    """Raises in every method and property, at once or when it is awaited."""

    def __init__(self, late: bool) -> None:
        vars(self).update(late=late)

    def __getattribute__(self, name: str) -> Any:
        if name in ("__class__", "__dict__", "late"):
            return object.__getattribute__(self, name)
        if name in ("scope", "weights"):
            raise KeyError("which")

        async def later(*arguments: Any) -> Any:
            raise KeyError("which")

        def now(*arguments: Any) -> Any:
            raise KeyError("which")

        return later if object.__getattribute__(self, "late") else now


BATCH: Any = None
HERE = Path("here")
CALLS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "agent metrics()": ("now", lambda failing: CheckedAgent(failing, "x").metrics()),
    "agent state()": ("now", lambda failing: CheckedAgent(failing, "x").state()),
    "agent check()": ("later", lambda failing: CheckedAgent(failing, "x").check([])),
    "agent tool_schemas()": ("later", lambda failing: CheckedAgent(failing, "x").tool_schemas([])),
    "agent restore()": ("now", lambda failing: CheckedAgent(failing, "x").restore({})),
    "reward scope": ("now", lambda failing: CheckedRewards(failing, "x").scope),
    "reward weights": ("now", lambda failing: CheckedRewards(failing, "x").weights),
    "reward restore()": ("now", lambda failing: CheckedRewards(failing, "x").restore({})),
    "critic expect()": ("later", lambda failing: critic(failing).expect(1)),
    "critic begin_updates()": ("later", lambda failing: critic(failing).begin_updates()),
    "critic end_updates()": ("later", lambda failing: critic(failing).end_updates()),
    "critic values()": ("later", lambda failing: critic(failing).values(BATCH)),
    "critic update()": ("later", lambda failing: critic(failing).update(BATCH)),
    "critic actor_may_update()": ("now", lambda failing: critic(failing).actor_may_update()),
    "critic save()": ("later", lambda failing: critic(failing).save(HERE)),
    "critic snapshot()": ("later", lambda failing: critic(failing).snapshot()),
    "critic write_snapshot()": ("later", lambda failing: critic(failing).write_snapshot(HERE)),
    "critic restore()": ("later", lambda failing: critic(failing).restore(HERE)),
    "critic restore_state()": ("now", lambda failing: critic(failing).restore_state({})),
}


def critic(component: Any) -> CheckedCritic:
    return CheckedCritic(component, "x", needed=True)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_what_a_component_raises_names_it_and_the_method(call: str, late: bool) -> None:
    kind, called = CALLS[call]

    async def run() -> None:
        found = called(Failing(late and kind == "later"))
        if kind == "later":
            await found

    with pytest.raises(PluginError) as caught:
        asyncio.run(run())
    error, _, line = str(caught.value).partition(" (")
    assert error == f"x: {call.split()[1]}: KeyError: 'which'"
    assert re.fullmatch(r"tests/runtime/test_checked_components\.py:\d+\)", line), "the component's"
