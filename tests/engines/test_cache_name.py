"""A model's code decides what its cache is called."""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rlcore.engines.hf.cache_name import cache_name


def decorated(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The function wrapped like every `forward` of transformers."""

    @functools.wraps(forward)
    def wrapper(*arguments: Any, **named: Any) -> Any:
        return forward(*arguments, **named)

    return wrapper


def renamed(input_ids: Any, cache: Any = None, **named: Any) -> None: ...


def earlier(input_ids: Any, past_key_values: Any = None, **named: Any) -> None: ...


@pytest.mark.parametrize(("forward", "name"), [(renamed, "cache"), (earlier, "past_key_values")])
def test_a_model_is_asked_for_the_name_of_its_cache(forward: Callable[..., Any], name: str) -> None:
    assert cache_name(SimpleNamespace(forward=decorated(forward))) == name
