"""One rank of a replica fails: which error is reported."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from rlcore.cluster.rank_answers import answers_of_ranks
from rlcore.errors import WorkerError


async def answer(after: asyncio.Event | None, value: str, then: asyncio.Event | None = None) -> str:
    """The value, or the error that it is the text of, when `after` is set."""
    if after is not None:
        await after.wait()
        await asyncio.sleep(0.01)  # another turn of the loop
    if then is not None:
        then.set()
    if value.startswith("error"):
        raise WorkerError(value)
    return value


def error_of(works: Callable[[], Sequence[Any]], *ended: int) -> str:
    async def ask() -> list[Any]:
        async with asyncio.timeout(2.0):
            return await answers_of_ranks(works(), ended.__contains__)

    with pytest.raises(WorkerError) as caught:
        asyncio.run(ask())
    return str(caught.value)


def test_the_answers_are_in_the_order_of_the_ranks() -> None:
    async def ask() -> list[Any]:
        gate = asyncio.Event()
        return await answers_of_ranks([answer(gate, "0"), answer(None, "1", then=gate)], lambda rank: False)

    assert asyncio.run(ask()) == ["0", "1"]


def test_a_rank_that_died_is_named_though_the_one_that_waited_for_it_complains_first() -> None:
    def works() -> list[Any]:
        gate = asyncio.Event()
        never = asyncio.Event()
        complaint = answer(None, "error: closed by peer", then=gate)
        return [complaint, answer(gate, "error: rank 1 died"), answer(never, "hangs")]

    assert error_of(works, 1) == "error: rank 1 died"


def test_a_rank_that_died_is_not_waited_beyond() -> None:
    assert error_of(lambda: [answer(asyncio.Event(), "hangs"), answer(None, "error: died")], 1) == "error: died"


def test_without_a_death_the_first_error_stands() -> None:
    def works() -> list[Any]:
        gate = asyncio.Event()
        return [answer(gate, "error: second"), answer(None, "error: first", then=gate)]

    assert error_of(works) == "error: first"
