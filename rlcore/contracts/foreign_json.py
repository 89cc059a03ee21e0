"""Reads JSON from services and agents: what it takes in memory is bounded before it is parsed."""

import json
from typing import Any

MAX_VALUES = 1_000_000
"""Most lists, objects and entries of one text. Its bytes bound them badly: a list of empty lists takes 30 times its
bytes."""


class TooManyValues(ValueError):
    """The text has more than MAX_VALUES values."""


def read_json(content: bytes) -> Any:
    """The value. TooManyValues, or ValueError if it is not JSON or is nested too deeply.

    Values are counted by the characters that begin or separate them, those inside texts included.
    """
    if sum(map(content.count, (b"[", b"{", b","))) > MAX_VALUES:
        raise TooManyValues(f"more than {MAX_VALUES} lists, objects and entries")
    try:
        return json.loads(content)
    except RecursionError as cause:
        raise ValueError("nested too deeply") from cause
