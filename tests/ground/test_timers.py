"""Deadlines of a loop share a timer, and each keeps its own time."""

import asyncio
from functools import partial

import pytest

from rlcore.aio import Timers

DEADLINE_S = 10.0
SOON_S = 0.01


def soon(seconds: float = SOON_S) -> float:
    """The time that many seconds from now."""
    return asyncio.get_running_loop().time() + seconds


def num_set() -> int:
    """Timers that the running loop has set."""
    return sum(not handle.cancelled() for handle in asyncio.get_running_loop()._scheduled)  # type: ignore[attr-defined]


def test_what_is_not_taken_back_comes_due_once() -> None:
    rung: list[str] = []

    async def ring() -> None:
        timers, last = Timers(), asyncio.Event()
        for name in "abc":
            timers.set(name, soon(), partial(rung.append, name))
        timers.take_back("b")
        timers.set("d", soon(2 * SOON_S), last.set)
        await asyncio.wait_for(last.wait(), DEADLINE_S)
        timers.take_back("a")
        await asyncio.sleep(2 * SOON_S)

    asyncio.run(ring())
    assert rung == ["a", "c"]


def test_many_share_one_timer_and_none_is_left_when_all_are_taken_back() -> None:
    async def timers_set() -> list[int]:
        timers = Timers()
        found = [num_set()]
        for key in range(100):
            timers.set(key, soon(DEADLINE_S), lambda: None)
        found.append(num_set())
        for key in range(100):
            timers.take_back(key)
            timers.take_back(key)
        return [*found, num_set()]

    assert asyncio.run(timers_set()) == [0, 1, 0]


def test_what_a_turn_of_the_loop_takes_back_itself_costs_no_timer_and_what_lasts_comes_due() -> None:
    rung: list[str] = []

    async def ring() -> list[int]:
        timers, over = Timers(), asyncio.Event()
        for key in ("kept", "kept later", "due"):
            timers.set_if_it_lasts(key, soon(), over.set if key == "due" else partial(rung.append, key))
            if key == "kept":
                timers.take_back(key)
        found = [num_set()]
        await asyncio.sleep(0)
        timers.take_back("kept later")
        found.append(num_set())
        await asyncio.wait_for(over.wait(), DEADLINE_S)
        return [*found, num_set()]

    assert asyncio.run(ring()) == [0, 1, 0]
    assert rung == []


def test_an_earlier_deadline_does_not_wait_for_the_timer_of_a_later_one() -> None:
    async def rang() -> bool:
        timers, early = Timers(), asyncio.Event()
        timers.set("late", soon(60.0), lambda: None)
        timers.set("early", soon(), early.set)
        await asyncio.wait([asyncio.create_task(early.wait())], timeout=DEADLINE_S)
        return early.is_set()

    assert asyncio.run(rang())


def test_the_timer_of_a_deadline_that_was_kept_rings_for_no_other() -> None:
    rung: list[str] = []

    async def ring() -> None:
        timers = Timers()
        timers.set("kept", soon(), partial(rung.append, "kept"))
        timers.set("later", soon(60.0), partial(rung.append, "later"))
        timers.take_back("kept")
        await asyncio.sleep(3 * SOON_S)

    asyncio.run(ring())
    assert rung == []


def test_nothing_comes_due_that_another_took_back_as_it_was_called() -> None:
    rung: list[str] = []

    async def ring() -> None:
        timers, due = Timers(), soon()
        timers.set("all", due, lambda: timers.take_back("other"))
        timers.set("other", due, partial(rung.append, "other"))
        await asyncio.sleep(3 * SOON_S)

    asyncio.run(ring())
    assert rung == []


def test_what_is_set_as_another_comes_due_delays_no_other_and_an_error_of_one_stops_no_other() -> None:
    rung: list[str] = []

    def fail() -> None:
        raise ValueError("the timer's")

    async def ring() -> list[str]:
        problems: list[str] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, about: problems.append(str(about["exception"])))
        timers, over, due = Timers(), asyncio.Event(), soon()
        timers.set("fails", due, fail)
        timers.set("first", due, lambda: timers.set("late", soon(), over.set))
        timers.set("second", due, partial(rung.append, "second"))
        await asyncio.wait_for(over.wait(), DEADLINE_S)
        return problems

    assert asyncio.run(ring()) == ["the timer's"]
    assert rung == ["second"]


def test_a_block_ends_at_its_own_time_and_no_other_cancellation_is_taken_for_that() -> None:
    async def block(timers: Timers, seconds: float) -> str:
        try:
            with timers.within(seconds):
                await asyncio.get_running_loop().create_future()
        except TimeoutError:
            return "late"
        return "never"

    async def use() -> list[str]:
        timers = Timers()
        blocks = [asyncio.create_task(block(timers, number)) for number in (60.0, 0.03, 0.0, 0.01, 60.0)]
        await asyncio.wait(blocks[1:4], timeout=DEADLINE_S)
        blocks[0].cancel()
        [cancelled] = await asyncio.gather(blocks[0], return_exceptions=True)
        with timers.within(2 * SOON_S):
            pass
        await asyncio.sleep(4 * SOON_S)  # a block that has ended is not cancelled any more
        still_waits = not blocks[4].done()
        blocks[4].cancel()
        await asyncio.gather(blocks[4], return_exceptions=True)
        return [*(block.result() for block in blocks[1:4]), type(cancelled).__name__, str(still_waits)]

    assert asyncio.run(use()) == ["late", "late", "late", "CancelledError", "True"]


def test_a_task_that_another_cancels_as_its_time_is_up_is_cancelled() -> None:
    async def use() -> BaseException | None:
        timers = Timers()
        limit = timers.within(0.0)

        async def block() -> None:
            with limit:
                await asyncio.get_running_loop().create_future()

        task = asyncio.create_task(block())
        timers.set("other", soon(-1.0), lambda: None)
        await asyncio.sleep(0)
        while not limit.expired:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task], timeout=DEADLINE_S)
        return task.exception() if not task.cancelled() else asyncio.CancelledError()

    assert isinstance(asyncio.run(use()), asyncio.CancelledError)


def test_a_time_limit_outside_of_a_task_says_so() -> None:
    async def use() -> str:
        caught_error = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().set_exception_handler(
            lambda _, about: caught_error.set_result(str(about["exception"]))
        )
        asyncio.get_running_loop().call_soon(Timers().within(1.0).__enter__)
        return str(await asyncio.wait_for(caught_error, DEADLINE_S))

    assert "of a task" in asyncio.run(use())


def test_what_a_block_raises_itself_passes() -> None:
    async def use() -> None:
        with Timers().within(DEADLINE_S):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        asyncio.run(use())
