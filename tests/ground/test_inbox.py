"""A queue for one reader, and the choice among targets that come and go."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from rlcore.aio import Dispatcher, Inbox


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 10.0))


def test_items_come_in_the_order_in_which_they_were_put_and_the_reader_waits_for_them() -> None:
    async def work() -> None:
        inbox: Inbox[int] = Inbox()
        reading = asyncio.create_task(inbox.take())
        await asyncio.sleep(0)
        assert not reading.done()
        inbox.put(1)
        inbox.put(2)
        assert [await reading, await inbox.take()] == [1, 2]
        assert not inbox

    run(work())


def test_the_first_error_is_raised_behind_all_items() -> None:
    async def work() -> None:
        inbox: Inbox[int] = Inbox()
        inbox.put(1)
        inbox.fail(ValueError("first"))
        inbox.fail(ValueError("second"))
        inbox.put(2)
        assert [await inbox.take(), await inbox.take()] == [1, 2]
        with pytest.raises(ValueError, match="first"):
            await inbox.take()

    run(work())


def test_an_error_wakes_a_reader_that_waits() -> None:
    async def work() -> None:
        inbox: Inbox[int] = Inbox()
        reading = asyncio.create_task(inbox.take())
        await asyncio.sleep(0)
        inbox.fail(KeyError("gone"))
        with pytest.raises(KeyError):
            await reading

    run(work())


LOADS = {"a": 2, "b": 1, "c": 1}


@pytest.mark.parametrize(
    ("usable", "avoid", "chosen"),
    [
        (lambda target: True, None, "b"),
        (lambda target: True, "b", "c"),
        (lambda target: target != "b", None, "c"),
        (lambda target: target == "a", "a", "a"),
        (lambda target: False, None, None),
    ],
)
def test_the_least_loaded_usable_target_is_chosen(
    usable: Callable[[str], bool], avoid: str | None, chosen: str | None
) -> None:
    async def work() -> None:
        assert Dispatcher(list(LOADS), usable).choose(LOADS.__getitem__, avoid) == chosen

    run(work())


def test_a_change_is_waited_for() -> None:
    async def work() -> None:
        dispatcher = Dispatcher(["a"], lambda target: True)
        dispatcher.notify()  # before anything waits: it counts for nothing
        waiting = asyncio.create_task(dispatcher.change())
        await asyncio.sleep(0)
        assert not waiting.done()
        dispatcher.notify()
        await waiting

    run(work())
