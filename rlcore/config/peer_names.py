"""Words errors about keys and values that TRL and verl have, from `rlcore/config/peer_names.toml`."""

import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

PEERS = {"trl": "TRL", "verl": "verl"}
"""Sections of the file, with their names in errors. If both have a name, the first one's meaning counts."""


def renamed_key(key: str) -> str:
    """The end of an error about an unknown dotted key that a peer has: the key to use; '' for any other key."""
    parts = key.split(".")
    for start in range(len(parts)):
        name = ".".join(parts[start:])
        for peer, label in PEERS.items():
            meaning = _table()[peer].get(name)
            if meaning is not None:
                return _worded(f"{label}'s {name}", meaning)
    return ""


def renamed_value(key: str, value: object, choices: Iterable[str] = ()) -> str:
    """The end of an error about a value that a peer's key takes and `key` does not; '' for any other value."""
    by_key: Mapping[str, Mapping[str, str]] = _table()["values"]
    for end, meanings in by_key.items():
        meaning = meanings.get(str(value))
        if f".{key}".endswith(f".{end}") and meaning is not None:
            others = ", ".join(sorted(choices))
            return f"'{value}' is '{meaning}' here" + (f"; choose from: {others}" if others else "")
    return ""


def names_of(key: str) -> list[str]:
    """Peers' names of a key, each with its peer, such as "learning_rate of TRL"."""
    return [
        f"{name} of {label}"
        for peer, label in PEERS.items()
        for name, meaning in _table()[peer].items()
        if meaning.split(" ")[0].partition("=")[0].rstrip(",;") == key
    ]


def _worded(whose: str, meaning: str) -> str:
    if meaning.startswith("- "):
        return f"{whose} has no key here: {meaning[2:]}"
    return f"{whose} is {meaning} here"


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(files("rlcore.config").joinpath("peer_names.toml").read_text("utf-8"))
