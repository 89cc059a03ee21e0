"""A child's answer is read without running anything, whatever code in the child wrote to the pipe."""

import asyncio
import collections
import copyreg
import datetime
import decimal
import io
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlcore.cluster import answers
from rlcore.cluster.child import ChildProcesses
from rlcore.contracts.scorer import Outcome
from rlcore.errors import ChildError
from rlcore.testing.leaks import leaks
from rlcore.types import FrozenDict, Lane, RewardStatus, TrajectoryId


class Text(str):
    def __reduce__(self) -> Any:
        return print, ("run",)


@dataclass(frozen=True)
class Foreign:
    value: int = 0


class Forged:
    """Pickles to (kind, data), as `dumps` tells it."""

    pid: Any = None


class Forger(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return value.pid if isinstance(value, Forged) else None


def forged(pid: Any) -> bytes:
    file, value = io.BytesIO(), Forged()
    value.pid = pid
    Forger(file, 4).dump(value)
    return file.getvalue()


PLAIN: list[Any] = [
    None,
    [1, -(2**70), 2.5, True, "\ud800", b"x", (1, (2, [])), {"a": {1, 2}}, frozenset({3}), bytearray(b"y")],
    ("ok", TrajectoryId("p", 1, 2)),
    {"lane": Lane.EVAL, RewardStatus.OK: FrozenDict({"a": 1})},
    float("inf"),
]


@pytest.mark.parametrize("value", PLAIN, ids=range(len(PLAIN)))
def test_plain_values_and_frozen_dataclasses_cross(value: Any) -> None:
    found = answers.loads(answers.dumps(value))
    assert found == value
    assert repr(found) == repr(value)


def test_an_outcome_crosses_with_its_arrays() -> None:
    outcome = Outcome(RewardStatus.OK, 0.5, "", {"a": 1.0}, {"x": (1, 2)}, np.arange(6, dtype=np.float32)[::2])
    [found] = answers.loads(answers.dumps([outcome]))
    assert (found.status, found.score, found.components, found.info) == (
        RewardStatus.OK,
        0.5,
        {"a": 1.0},
        {"x": (1, 2)},
    )
    np.testing.assert_array_equal(found.token_scores, outcome.token_scores)
    assert found.token_scores.dtype == np.float32
    scalar = answers.loads(answers.dumps(np.float64(0.25)))
    assert (scalar, type(scalar)) == (0.25, np.float64)


@pytest.mark.parametrize("value", [Text("hello"), collections.OrderedDict(a=1), collections.Counter("aa")])
def test_a_class_derived_from_a_built_in_one_crosses_as_that(value: Any) -> None:
    found = answers.loads(answers.dumps(value))
    assert type(found) in answers.PLAIN
    assert found == value


@pytest.mark.parametrize(
    "value",
    [decimal.Decimal(1), datetime.date(2020, 1, 1), print, int, np.array([object()]), {"a": lambda: 0}, object()],
)
def test_anything_else_is_refused_where_it_is_made(value: Any) -> None:
    with pytest.raises(TypeError, match=r"cannot cross from a child process; needs built-in values"):
        answers.dumps(value)


def reducing(function: Callable[..., Any], *args: Any) -> bytes:
    class Reduced:
        def __reduce__(self) -> Any:
            return function, args

    return pickle.dumps(Reduced())


FORGED = {
    "a function": reducing(exec, "raise SystemExit(1)"),
    "a class": pickle.dumps(Foreign(1)),
    "one of rlcore": pickle.dumps(Outcome(RewardStatus.OK)),
    "a built-in": reducing(eval, "1"),
    "a dotted name": b"\x80\x04\x8c\x17rlcore.contracts.scorer\x8c\x09os.getpid\x93)R.",
    "no pair": forged("x"),
    "an unknown kind": forged(("module", "os")),
    "a kind that does not hash": forged(([], 1)),
    "a class of another package": forged(("dataclass", (Foreign.__module__, "Foreign", {}))),
    "a function as class": forged(("dataclass", ("rlcore.errors", "boundary", {}))),
    "a module of a name": forged(("dataclass", ("rlcore.contracts.scorer", "math", {}))),
    "a dotted class": forged(("dataclass", ("rlcore.contracts.scorer", "Outcome.__init__", {}))),
    "a module that is not imported": forged(("dataclass", ("rlcore.cli.export", "Export", {}))),
    "wrong fields": forged(("dataclass", ("rlcore.contracts.scorer", "Outcome", {"__class__": 1}))),
    "fields that are none": forged(("dataclass", ("rlcore.contracts.scorer", "Outcome", 7))),
    "a class that may be written to": forged(("dataclass", ("rlcore.cluster.child", "PendingCall", {}))),
    "a member that is not there": forged(("enum", ("rlcore.types", "Lane", "__class__"))),
    "a dataclass as enum": forged(("enum", ("rlcore.contracts.scorer", "Outcome", "status"))),
    "an array of objects": forged(("array", ("|O", (1,), b"\0" * 8, False))),
    "an array of texts": forged(("array", ("<U1", (1,), b"\0" * 4, False))),
    "an array of other size": forged(("array", ("<f4", (9,), b"\0" * 8, False))),
    "a negative shape": forged(("array", ("<f4", (-1, 0), b"", False))),
    "not a dict": forged(("frozen", [1])),
    "an extension": b"\x80\x02\x82\x01.",
    "noise": b"\x80\x05\x95\xff\xff",
    "nothing": b"",
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_answer_is_refused_and_runs_nothing(name: str) -> None:
    assert not copyreg._inverted_registry  # type: ignore[attr-defined]
    with pytest.raises((pickle.UnpicklingError, EOFError, ValueError)):
        answers.loads(FORGED[name])


def test_nothing_that_is_called_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = forged(("dataclass", ("rlcore.contracts.scorer", "Outcome", {"status": 1})))
    assert answers.loads(answer).status == 1
    monkeypatch.setattr(Outcome, "__call__", lambda self, *args: print("run"), raising=False)
    with pytest.raises(pickle.UnpicklingError):
        answers.loads(answer)


def test_the_package_that_is_served_may_add_dataclasses() -> None:
    package = Foreign.__module__.partition(".")[0]
    answer = forged(("dataclass", (Foreign.__module__, "Foreign", {"value": 3})))
    assert Foreign.__module__ in sys.modules
    assert answers.loads(answer, package) == Foreign(3)


FORGING = """
import os, pickle, struct, sys
from pathlib import Path

class Evil:
    def __init__(self, mark): self.mark = mark
    def __reduce__(self): return Path.touch, (Path(self.mark),)

class Served:
    def forge(self, mark, kind):
        value = {
            "object": ("ok", Evil(mark)),
            "bare": Evil(mark),
            "error": ("ours", ("boundary", "x")),
            "arity": ("raised", (1, 2, 3)),
            "kind": (["ok"], 1),
            "text": "ok",
        }[kind]
        payload = pickle.dumps(value)
        for descriptor in range(3, 64):  # the pipe to the parent is one of them
            try:
                os.write(descriptor, struct.pack("!QQ", len(payload), 1) + payload)
            except OSError:
                pass
        return "honest"
    def add(self, a, b):
        return a + b
"""


@pytest.mark.parametrize("kind", ["object", "bare", "error", "arity", "kind", "text"])
def test_a_child_that_writes_to_its_pipe_runs_nothing_in_the_parent(tmp_path: Path, kind: str) -> None:
    (tmp_path / "forging.py").write_text(FORGING)
    mark = tmp_path / "it ran"

    async def work() -> None:
        children = ChildProcesses()
        child = await children.start(f"{tmp_path / 'forging.py'}:Served", name="forger")
        with pytest.raises(ChildError):
            await child.call("forge", str(mark), kind, deadline_s=20.0)
        assert child.alive
        assert await child.call("add", 1, 2, deadline_s=20.0) == 3
        await children.close()

    with leaks():
        asyncio.run(work())
    assert not mark.exists()
