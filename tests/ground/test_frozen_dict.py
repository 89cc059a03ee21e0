"""A FrozenDict is a dict to readers, and refuses to be written."""

import copy
import json
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import orjson
import pytest

from rlcore.types import FrozenDict, plain

ITEMS = {"a": 1, "b": ("x", None)}
WRITES: dict[str, Callable[[Any], object]] = {
    "setitem": lambda it: it.__setitem__("a", 2),
    "delitem": lambda it: it.__delitem__("a"),
    "ior": lambda it: it.__ior__({"a": 2}),
    "clear": lambda it: it.clear(),
    "pop": lambda it: it.pop("a"),
    "pop with a default": lambda it: it.pop("c", None),
    "popitem": lambda it: it.popitem(),
    "setdefault": lambda it: it.setdefault("c", 3),
    "update": lambda it: it.update(a=2),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_every_method_that_writes_is_refused_and_nothing_changes(write: Callable[[Any], object]) -> None:
    frozen = FrozenDict[str, Any](ITEMS)
    with pytest.raises(TypeError, match=r"cannot be written to; make another one: FrozenDict\(\{\*\*old"):
        write(frozen)
    assert frozen == ITEMS


def test_no_method_of_dict_that_changes_it_was_forgotten() -> None:
    reads = {"copy", "fromkeys", "get", "items", "keys", "values"}
    ours = {name for name, value in vars(FrozenDict).items() if value is FrozenDict.clear}
    public = {name for name in vars(dict) if not name.startswith("_")}
    assert ours == (public - reads) | {"_refuse", "__setitem__", "__delitem__", "__ior__"}


def test_what_it_was_made_of_may_change_without_it() -> None:
    source = dict(ITEMS)
    frozen = FrozenDict(source)
    source["a"] = 2
    assert frozen["a"] == 1


def test_it_is_written_as_json_like_any_dict() -> None:
    nested = FrozenDict({"inner": FrozenDict(ITEMS)})
    assert json.loads(json.dumps(nested)) == orjson.loads(orjson.dumps(nested)) == {"inner": {"a": 1, "b": ["x", None]}}


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_a_copy_is_as_frozen_and_equal(again: Callable[[Any], Any]) -> None:
    frozen = FrozenDict(ITEMS)
    found = again(frozen)
    assert type(found) is FrozenDict
    assert found == frozen
    assert hash(found) == hash(frozen) == hash(FrozenDict({"b": ("x", None), "a": 1}))
    assert repr(found) == "FrozenDict({'a': 1, 'b': ('x', None)})"


def test_merged_with_another_it_is_a_dict_that_can_be_written_to() -> None:
    assert type(FrozenDict({"a": 1}) | {"b": 2}) is dict
    assert FrozenDict({**FrozenDict({"a": 1}), "b": 2}) == {"a": 1, "b": 2}


def test_plain_values_are_dicts_and_lists_all_the_way_down() -> None:
    value = FrozenDict({"a": (1, FrozenDict({"b": (2,)})), 3: "text"})
    found = plain(value)
    assert found == {"a": [1, {"b": [2]}], 3: "text"}
    assert [type(found), type(found["a"]), type(found["a"][1])] == [dict, list, dict]
    assert plain(value, leaf=repr, key=str) == {"a": ["1", {"b": ["2"]}], "3": "'text'"}


def test_plain_numbers_are_those_of_python() -> None:
    found = plain({"a": np.float32(0.5), "b": [np.int64(3)], "c": np.bool_(True)})
    assert repr(found) == "{'a': 0.5, 'b': [3], 'c': True}"
