"""Reward functions on the run's loop get private copies of everything writable."""

import pickle
from collections import OrderedDict

import numpy as np
import pytest

from rlcore.reward.copies import private_copy
from rlcore.types import FinishReason, FrozenDict, Prompt, Trajectory, TrajectoryId


def trajectory(columns: FrozenDict[str, object], content: object = "Hello") -> Trajectory:
    prompt = Prompt("all/0", (FrozenDict({"role": "user", "content": content}),), "7", "all", columns)
    return Trajectory(
        TrajectoryId("all/0", 0, 3),
        prompt,
        np.array([1, 2, 3], dtype=np.int32),
        np.array([False, True, True]),
        np.array([0.0, -1.0, -2.0], dtype=np.float32),
        "text",
        FinishReason.STOP,
        ((1, 0),),
    )


def test_values_that_cannot_be_written_to_are_shared() -> None:
    row = trajectory(FrozenDict({"level": 3, "pair": ("a", 1.5), "none": None}))
    assert private_copy(row) is row
    with pytest.raises(ValueError, match="read-only"):
        row.token_ids[0] = 9
    assert private_copy(np.float32(0.5)) == 0.5


@pytest.mark.parametrize(
    "value",
    [
        [1, 2],
        [],
        {"a": 1},
        {"a": {"b": [1, {"c": 2}]}},
        {1, 2},
        bytearray(b"ab"),
        OrderedDict(a=1),
        ([1], 2),
        (0, (FrozenDict({"inner": [1]}),)),
        FrozenDict({"inner": [1]}),
    ],
)
def test_whatever_can_be_written_to_is_copied_and_equal(value: object) -> None:
    row = trajectory(FrozenDict({"level": 3, "extra": value}))
    copied = private_copy(row)
    extra = copied.prompt.columns["extra"]
    assert extra is not value
    assert type(extra) is type(value)
    assert repr(extra) == repr(value)
    assert (copied.id, copied.completion, copied.prompt.id) == (row.id, row.completion, row.prompt.id)
    assert copied.prompt.columns["level"] == 3
    assert private_copy(row).prompt.columns["extra"] is not extra


def test_contents_of_a_message_are_copied() -> None:
    part = {"type": "text", "text": "Hello"}
    copied = private_copy(trajectory(FrozenDict(), [part]))
    copied.prompt.messages[0]["content"][0]["text"] = "Bye"
    assert part["text"] == "Hello"
    assert copied.prompt.messages[0]["role"] == "user"


def test_arrays_that_can_be_written_to_are_copied_and_stay_so() -> None:
    numbers = np.arange(3)
    objects = np.array([[1], None], dtype=object)
    objects.setflags(write=False)
    copied = private_copy((numbers, objects))
    copied[0][0] = 9
    copied[1][0].append(9)
    assert numbers.tolist() == [0, 1, 2]
    assert objects.tolist() == [[1], None]


def test_what_holds_itself_is_copied_once() -> None:
    ring: list[object] = [1]
    ring.append(FrozenDict({"ring": ring}))
    copied = private_copy(ring)
    assert copied is not ring
    held = copied[1]
    assert isinstance(held, FrozenDict)
    assert held["ring"] is copied


def test_what_cannot_be_copied_is_refused() -> None:
    with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
        private_copy(trajectory(FrozenDict({"extra": [lambda: 1]})))
