"""The names of variables and functions are nouns and verbs that say what is held or done."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

ROOMS = ("rlcore", "plugins", "view", "examples", "benchmarks", "tests", "docs")
PARTICIPLES = frozenset({"said", "told", "asked", "given", "owed"})
"""They say that something happened, and not what is held: a message, a request, arguments, what is pending."""
PRONOUNS = frozenset({"item", "each", "one"})
"""They say nothing of what a loop goes over."""
TICS = re.compile(
    r"(^|_)(anew|beside|nobody|somebody|whoever|under_way|told|let_go|given_up|taken_up|go(es)?_on|mend(s|ed)?"
    r"|reckon(s|ed)?|of_(its|their|our)_own|held_against|in_the_mean)(_|$)",
    re.IGNORECASE,
)
"""Phrases that tests/test_prose.py refuses in texts."""


def bound_names(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """(line, name) of every function, class, parameter, variable and attribute that is defined or assigned."""
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def loop_names(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """(line, name) of the variables of every loop and comprehension, and of the parameters of every lambda."""
    for node in nodes:
        if isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
            for part in ast.walk(node.target):
                if isinstance(part, ast.Name):
                    yield part.lineno, part.id
        elif isinstance(node, ast.Lambda):
            yield from ((parameter.lineno, parameter.arg) for parameter in node.args.args)


def vague_names(source: str) -> list[str]:
    """'line: name' of the names that say nothing of what they hold."""
    nodes = list(ast.walk(ast.parse(source)))
    found = [pair for pair in bound_names(nodes) if pair[1].strip("_").lower() in PARTICIPLES]
    found += [pair for pair in bound_names(nodes) if TICS.search(pair[1])]
    found += [pair for pair in loop_names(nodes) if pair[1].strip("_") in PRONOUNS]
    return [f"{line}: {name}" for line, name in sorted(set(found))]


def files() -> list[Path]:
    """Every Python file of the repository, except for what a build left there."""
    return [path for room in ROOMS for path in (ROOT / room).rglob("*.py") if "build" not in path.parts]


@pytest.mark.slow
def test_names_say_what_they_hold() -> None:
    """No name is a participle or has a tic, and no loop goes over an `item`."""
    found = [f"{path.relative_to(ROOT)}:{name}" for path in files() for name in vague_names(path.read_text())]
    assert not found, found


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("said = 1", "1: said"),
        ("_given: int = 1", "1: _given"),
        ("def told(): ...", "1: told"),
        ("class Asked: ...", "1: Asked"),
        ("def use(owed=0): ...", "1: owed"),
        ("class C:\n    def __init__(self):\n        self._asked = 0", "3: _asked"),
        ("for item in (): ...", "1: item"),
        ("async def use():\n    async for _, each in a: ...", "2: each"),
        ("[one for one in ()]", "1: one"),
        ("def test_it_is_started_anew(): ...", "1: test_it_is_started_anew"),
        ("self.num_under_way = 0", "1: num_under_way"),
        ("sorted((), key=lambda item: 0)", "1: item"),
    ],
)
def test_the_check_of_names_sees_them_wherever_they_are_bound(source: str, name: str) -> None:
    """Finds them as variable, attribute, parameter, function, class, and in loops of every kind."""
    assert vague_names(source) == [name]


def test_the_check_of_names_leaves_what_others_named() -> None:
    """Imports, calls, and a function's parameter `item`."""
    assert not vague_names("from hypothesis import given\ngiven(st.data())\ndef put(item): ...\none = other.told()")
