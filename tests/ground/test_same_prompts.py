"""The prompt of a trajectory is that of its task, even if another process sent it back."""

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rlcore.errors.checks.same_prompt import other_field
from rlcore.types import FrozenDict, Prompt

COLUMNS: dict[str, Any] = {"level": float("nan"), "tags": ["a", {"b": 1}], "image": np.arange(3), "object": object()}
PROMPT = Prompt("p/0", ({"role": "user", "content": "how many?"},), float("nan"), "p", FrozenDict(COLUMNS))


def test_a_copy_from_another_process_has_no_other_field() -> None:
    assert other_field(pickle.loads(pickle.dumps(PROMPT)), PROMPT) == ""


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("id", "p/1"),
        ("messages", ()),
        ("messages", ({"role": "user", "content": "how much?"},)),
        ("answer", 7.0),
        ("answer", None),
        ("source", "q"),
        ("columns", FrozenDict({**COLUMNS, "tags": ["a", {"b": 2}]})),
        ("columns", FrozenDict({**COLUMNS, "more": 1})),
        ("columns", FrozenDict({**COLUMNS, "object": "text"})),
        ("conversational", True),
    ],
)
def test_a_changed_field_is_found(name: str, value: Any) -> None:
    assert other_field(replace(PROMPT, **{name: value}), PROMPT) == name
