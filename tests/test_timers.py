"""Deadlines of the same length share a timer."""

import asyncio
from functools import partial

from rlcore.reward.timers import Timers

DEADLINE_S = 10.0


def test_what_is_not_taken_back_comes_due_once_in_the_order_in_which_it_was_set() -> None:
    rung: list[str] = []

    async def ring() -> None:
        timers, last = Timers(0.01), asyncio.Event()
        for name in "abc":
            timers.set(name, partial(rung.append, name))
        timers.take_back("b")
        await asyncio.sleep(0)
        timers.set("d", last.set)
        await asyncio.wait_for(last.wait(), DEADLINE_S)
        timers.take_back("a")

    asyncio.run(ring())
    assert rung == ["a", "c"]


def test_nothing_comes_due_that_another_took_back_as_it_was_called() -> None:
    rung: list[str] = []

    async def ring() -> None:
        timers, over = Timers(0.01), asyncio.Event()
        timers.set("all", lambda: timers.take_back("other"))
        await asyncio.sleep(0.002)
        timers.set("other", lambda: rung.append("other"))
        await asyncio.sleep(0.002)
        timers.set("end", over.set)
        await asyncio.wait_for(over.wait(), DEADLINE_S)

    asyncio.run(ring())
    assert rung == []


def test_a_key_of_which_nothing_is_left_leaves_no_timer_behind() -> None:
    async def left() -> int:
        timers = Timers(DEADLINE_S)
        timers.set("only", lambda: None)
        timers.take_back("only")
        timers.take_back("only")
        await asyncio.sleep(0)
        return sum(not each.cancelled() for each in asyncio.get_running_loop()._scheduled)  # type: ignore[attr-defined]

    assert asyncio.run(left()) == 0


def test_what_is_set_as_another_comes_due_delays_nobody() -> None:
    rung: list[str] = []

    async def ring() -> None:
        timers, over = Timers(0.01), asyncio.Event()
        timers.set("first", lambda: timers.set("late", over.set))
        timers.set("second", partial(rung.append, "second"))
        await asyncio.wait_for(over.wait(), DEADLINE_S)

    asyncio.run(ring())
    assert rung == ["second"]
