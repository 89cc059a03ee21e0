"""Hostile answers of services, agents, rows and files, for property tests; needs the package hypothesis.

`settings_of_fuzz` reads the number of examples from RLCORE_FUZZ_EXAMPLES. Without it, a test is the same every time.
"""

import copy
import json
import os
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

EXAMPLES = "RLCORE_FUZZ_EXAMPLES"
"""Environment variable with the number of examples per test; `make fuzz` sets it."""
NASTY_TEXTS = (
    "",
    " ",
    "\x00",
    "\ud800",
    "\u2028\x85",
    "\x1b[2J\x1b]0;title\x07",
    "[red]x[/blue]",
    "[/]",
    "${oc.env:HOME}",
    "${a.b}",
    "???",
    "../../etc/passwd",
    "NaN",
    "1e999",
    "<|endoftext|>",
    "{{ 1/0 }}",
    "%s%n",
    "x" * 5000,
    "é́" * 50,
    "null",
)
NASTY_NUMBERS: tuple[Any, ...] = (0, -1, 1, True, False, 2**31, 2**63, -(2**63) - 1, 10**400, 0.0, -0.0, 1e-320, 3.5e38)
NOT_FINITE = (float("nan"), float("inf"), float("-inf"))


def settings_of_fuzz(examples: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The settings of a property test: this number of examples, unless RLCORE_FUZZ_EXAMPLES sets another."""
    num_examples = int(os.environ.get(EXAMPLES, "0"))
    return settings(
        max_examples=num_examples or examples,
        derandomize=not num_examples,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def texts() -> st.SearchStrategy[str]:
    """Any text, including lone surrogates and control characters."""
    return st.one_of(st.sampled_from(NASTY_TEXTS), st.text(st.characters(codec=None), max_size=30))


def scalars() -> st.SearchStrategy[Any]:
    """Any JSON value that is not a container, as Python reads it, including NaN and infinity."""
    return st.one_of(
        st.none(), st.sampled_from(NASTY_NUMBERS), st.sampled_from(NOT_FINITE), st.integers(), st.floats(), texts()
    )


def nested(depth: int) -> Any:
    """Lists and objects, nested to this depth."""
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"k": value}
    return value


def json_values() -> st.SearchStrategy[Any]:
    """Any JSON, including values that are nested too deep."""
    shallow = st.recursive(
        scalars(),
        lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts(), inner, max_size=4)),
        max_leaves=8,
    )
    return st.one_of(shallow, st.sampled_from((30, 100, 500)).map(nested))


def encoded(value: Any) -> bytes:
    """The value as JSON, with NaN and surrogates as Python writes them."""
    return json.dumps(value).encode()


@st.composite
def changed(draw: st.DrawFn, value: Any) -> Any:
    """The JSON value with one entry, at any depth, replaced, removed or renamed."""
    found = copy.deepcopy(value)
    places = _places(found)
    if not places:
        return draw(json_values())
    holder, key = draw(st.sampled_from(places))
    how = draw(st.sampled_from(("replace", "replace", "remove", "rename")))
    if how == "replace":
        holder[key] = draw(json_values())
    elif how == "remove":
        del holder[key]
    elif isinstance(holder, dict):
        holder[draw(texts())] = holder.pop(key)
    else:
        holder.insert(key, draw(json_values()))
    return found


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in the value."""
    found: list[tuple[Any, Any]] = []
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in inner:
        found += [(value, key), *_places(child)]
    return found


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """The bytes as a bad disk or a crash may leave them: flipped, cut, overwritten, with insertions, or empty."""
    at = draw(st.integers(0, max(0, len(data) - 1)))
    how = draw(st.sampled_from(("flip", "cut", "zeros", "insert", "empty", "twice", "noise")))
    if how == "flip" and data:
        return data[:at] + bytes([data[at] ^ (1 << draw(st.integers(0, 7)))]) + data[at + 1 :]
    if how == "cut":
        return data[:at]
    if how == "zeros":
        return data[:at] + bytes(len(data) - at)
    if how == "insert":
        return data[:at] + draw(st.binary(min_size=1, max_size=40)) + data[at:]
    if how == "twice":
        return data + data[at:]
    return b"" if how == "empty" else draw(st.binary(max_size=200))
