"""The boundary around somebody else's code turns every exception of theirs into one line."""

import asyncio

import pytest

from rlcore.errors import PluginError, boundary


class Odd(BaseException):
    """Derived from no Exception, as a plugin's own may be."""


@pytest.mark.parametrize("cause", [ValueError("x"), SystemExit(0), Odd("x")])
def test_an_exception_of_theirs_names_whose_code_it_was(cause: BaseException) -> None:
    with (
        pytest.raises(PluginError, match=r"^plugin 'mine': build\(\): ") as caught,
        boundary("plugin 'mine': build()", PluginError),
    ):
        raise cause
    assert caught.value.__cause__ is cause


@pytest.mark.parametrize("cause", [KeyboardInterrupt(), asyncio.CancelledError(), GeneratorExit()])
def test_what_the_user_the_loop_and_a_generator_raise_passes(cause: BaseException) -> None:
    with pytest.raises(type(cause)), boundary("plugin 'mine': build()", PluginError):
        raise cause
