"""The boundary around foreign code turns each of its exceptions into one line."""

import asyncio
import signal
import sysconfig
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from rlcore.errors import CALLED, Boundary, ConfigError, PluginError, WorkerError, boundary, describe, trace_of
from rlcore.errors.redaction import LONGEST_TEXT, beginning, remember_variable
from rlcore.errors.user_lines import line_of, short


class Odd(BaseException):
    """Derived from no Exception, as a plugin's own may be."""


def raised(text: str) -> KeyError:
    """An error that repeats the text of its cause."""
    try:
        try:
            raise ValueError(text)
        except ValueError as cause:
            raise KeyError(text + "!") from cause
    except KeyError as error:
        return error


@pytest.mark.parametrize("num_shown", [1, 5, 19])
def test_the_text_of_an_exception_is_cut_and_holds_no_half_of_a_secret(
    num_shown: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLCORE_TEST_TOKEN", "s3cr3t-s3cr3t-s3cr3t")
    remember_variable("RLCORE_TEST_TOKEN")
    error = raised("x" * 10 * LONGEST_TEXT)
    assert 1000 < len(describe(error)) <= len("KeyError: ") + LONGEST_TEXT
    assert 1000 < len(trace_of(error)) <= LONGEST_TEXT
    kept = beginning("x" * (LONGEST_TEXT - num_shown) + "s3cr3t-s3cr3t-s3cr3t")
    assert kept == "x" * (LONGEST_TEXT - num_shown)
    assert beginning(kept + "s3cr3t-s3cr3t-s3cr3t"[:num_shown]) == kept  # another process has cut it


@pytest.mark.parametrize("cause", [ValueError("x"), SystemExit(0), Odd("x")])
def test_an_exception_in_foreign_code_names_its_source(cause: BaseException) -> None:
    with (
        pytest.raises(PluginError, match=r"^plugin 'mine': build\(\): ") as caught,
        boundary("plugin 'mine': build()", PluginError),
    ):
        raise cause
    assert caught.value.__cause__ is cause


@pytest.mark.parametrize(
    "cause", [KeyboardInterrupt(), asyncio.CancelledError(), GeneratorExit(), BaseExceptionGroup("x", [SystemExit(0)])]
)
def test_what_their_code_raises_itself_is_theirs(cause: BaseException) -> None:
    with pytest.raises(PluginError, match=r"^plugin 'mine': "), boundary("plugin 'mine': build()", PluginError):
        raise cause


def test_a_cancellation_that_was_not_asked_for_is_theirs() -> None:
    async def main() -> None:
        waited = asyncio.create_task(asyncio.sleep(9))
        asyncio.get_running_loop().call_soon(waited.cancel)
        with boundary("plugin 'mine': score()", PluginError):
            await waited

    with pytest.raises(PluginError, match=r"^plugin 'mine': score\(\): CancelledError"):
        asyncio.run(main())


def test_an_interrupt_of_the_user_passes() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        with pytest.raises(KeyboardInterrupt), boundary("plugin 'mine': build()", PluginError):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_cancellation_of_the_task_passes() -> None:
    async def waits() -> None:
        with boundary("plugin 'mine': score()", PluginError, CALLED):
            await asyncio.sleep(9)

    async def main() -> None:
        task = asyncio.create_task(waits())
        asyncio.get_running_loop().call_soon(task.cancel)
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())


def test_the_end_of_a_generator_passes() -> None:
    ended = []

    async def stream() -> AsyncIterator[int]:
        try:
            with boundary("plugin 'mine': rollout()", PluginError):
                try:
                    yield 1
                except GeneratorExit:
                    raise
        except GeneratorExit:
            ended.append("as it was told")
            raise

    async def main() -> None:
        rows = stream()
        await anext(rows)
        await rows.aclose()  # type: ignore[attr-defined]

    asyncio.run(main())
    assert ended == ["as it was told"]


SITE = f"{sysconfig.get_paths()['purelib']}/"


def function_in(file: str, code: str, **names: Any) -> Callable[[], object]:
    """The function `f` of this code, as if it were in that file."""
    exec(compile(code, file, "exec"), names)
    found: Callable[[], object] = names["f"]
    return found


FAILS = "def f():\n    raise KeyError('x')\n"
CALLS = "def f():\n    return inner()\n"
PLACES = {
    "a file": (function_in("/there/mine.py", FAILS), " (/there/mine.py:2)"),
    "a file next to it": (
        function_in("/there/mine.py", CALLS, inner=function_in("/there/more/part.py", FAILS)),
        " (/there/more/part.py:2)",
    ),
    "a library that it calls": (
        function_in("/there/mine.py", CALLS, inner=function_in(f"{SITE}somewhere.py", FAILS)),
        " (/there/mine.py:2)",
    ),
    "an installed plugin": (
        function_in(f"{SITE}mine/hooks.py", CALLS, inner=function_in(f"{SITE}torch/nn.py", FAILS)),
        f" ({short(SITE)}mine/hooks.py:2)",
    ),
    "called by torch": (
        function_in(f"{SITE}torch/autograd.py", CALLS, inner=function_in("/there/mine.py", FAILS)),
        " (/there/mine.py:2)",
    ),
    "called by Python": (
        function_in("<frozen importlib>", CALLS, inner=function_in("/there/mine.py", FAILS)),
        " (/there/mine.py:2)",
    ),
    "torch alone": (function_in(f"{SITE}torch/nn.py", FAILS), ""),
    "Python alone": (function_in("<frozen os>", FAILS), ""),
}


@pytest.mark.parametrize("name", PLACES)
def test_an_error_of_a_plugin_or_worker_has_the_line_of_user_code(name: str) -> None:
    function, place = PLACES[name]
    caller = function_in(line_of.__code__.co_filename, CALLS, inner=function)  # rlcore's own frame
    for kind in (PluginError, WorkerError, ConfigError):
        with pytest.raises(kind) as caught:
            Boundary("mine", kind, Exception).__exit__(*raised_by(caller))
        assert str(caught.value) == f"mine: KeyError: 'x'{place if kind is not ConfigError else ''}"


def raised_by(function: Callable[[], object]) -> Any:
    """The arguments of `__exit__` for the function's exception, without the frame of this one."""
    try:
        function()
    except KeyError as error:
        return type(error), error.with_traceback(error.__traceback__.tb_next), None  # type: ignore[union-attr]
    pytest.fail("it raises")


def test_a_message_whose_first_line_ends_in_a_colon_is_whole() -> None:
    assert (
        describe(ValueError("needs one of:\n  (1) this\n  (2) that")) == "ValueError: needs one of: (1) this (2) that"
    )
    assert describe(ValueError("a reason\nand more")) == "ValueError: a reason"
