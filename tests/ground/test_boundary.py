"""The boundary around foreign code turns each of its exceptions into one line."""

import asyncio
import signal
from collections.abc import AsyncIterator

import pytest

from rlcore.errors import CALLED, PluginError, boundary, describe, trace_of
from rlcore.errors.redaction import LONGEST_TEXT, beginning, remember_variable


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
