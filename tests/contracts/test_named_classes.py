"""Classes named by a configuration, which may but need not inherit from what they are used as."""

import functools
from typing import Any

import pytest

from rlcore.contracts.named_classes import unusable


class Game:
    """The interface of these tests."""

    def reset(self, seed: int) -> Any:
        """Has a default."""

    def step(self, turn: str) -> Any: ...

    def call(self, **arguments: Any) -> Any: ...

    def close(self) -> Any:
        """Has a default."""


def wrapped(method: Any) -> Any:
    return functools.wraps(method)(lambda *args: method(*args))


async def waits(self: Any, *args: Any) -> None:
    """Any arguments."""


def plain(self: Any, *args: Any) -> None:
    """Any arguments."""


def generates(self: Any, *args: Any) -> Any:
    yield 1


async def streams(self: Any, *args: Any) -> Any:
    yield 1


NEEDED: dict[str, Any] = {"reset": plain, "step": waits, "call": lambda self, a, *, b: None}
USABLE: dict[str, dict[str, Any]] = {
    "plain and async": NEEDED,
    "static": {**NEEDED, "step": staticmethod(lambda turn: None)},
    "another word": {**NEEDED, "closed": plain, "rest": plain},
    "a private slip": {**NEEDED, "_colse": plain},
    "all": {**NEEDED, "close": plain},
    "by __getattr__": {"__getattr__": lambda self, name: plain},
    "a value": {**NEEDED, "close": 3},
}


@pytest.mark.parametrize("bases", [(), (Game,)])
@pytest.mark.parametrize("name", USABLE)
def test_a_class_with_the_required_methods_is_usable(name: str, bases: tuple[type, ...]) -> None:
    assert unusable(type("Mine", bases, USABLE[name]), Game, ["reset", "step", "call"]) == ()


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a slip": ({**NEEDED, "colse": plain}, "it defines colse(), which nothing calls, and not close(); rename it"),
    "lacks two": ({"call": plain}, "it does not define reset, step"),
    "not callable": ({**NEEDED, "step": 3}, "it does not define step"),
    "a parameter less": ({**NEEDED, "step": lambda self: None}, "step() takes (self), needs (self, turn): too many"),
    "a parameter more": (
        {**NEEDED, "reset": lambda self, a, b: None},
        "reset() takes (self, a, b), needs (self, seed)",
    ),
    "a generator": ({**NEEDED, "step": generates}, "step() is a generator; needs a method that returns"),
    "a stream": ({**NEEDED, "call": wrapped(streams)}, "call() is an async generator; needs a method that returns"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_class_that_its_caller_could_not_use_is_refused(name: str) -> None:
    methods, clause = WRONG[name]
    [found] = unusable(type("Mine", (), methods), Game, ["reset", "step", "call"])
    assert found.startswith(clause)


def test_a_slip_next_to_a_default_of_the_interface_is_refused_and_one_of_a_foreign_base_is_not() -> None:
    mine = type("Mine", (Game,), {"rest": plain})
    [found] = unusable(mine, Game, [])
    assert found.startswith("it defines rest(), which nothing calls, and not reset()")
    foreign = type("Foreign", (), {"colse": plain, "__module__": "elsewhere"})
    assert unusable(type("Both", (foreign,), NEEDED), Game, ["step"]) == ()
