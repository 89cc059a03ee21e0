"""The pool of killable children: who runs where, who waits for whom, and what becomes of those that die."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rlcore.aio import Slot, SlotQueue, Stopwatch
from rlcore.cluster.child import ChildProcesses
from rlcore.contracts.children import Child, ChildPool, LostProcess, NoChildren, RestartError
from rlcore.errors import ChildError, WorkerError
from rlcore.types import Lane


class Fake:
    """A child whose calls end on command; the method 'die' kills it."""

    def __init__(self, index: int) -> None:
        self.index, self.alive, self.closed = index, True, False
        self.calls: list[str] = []
        self.release = asyncio.Event()

    async def call(self, method: str, *args: Any, deadline_s: float) -> Any:
        self.calls.append(method)
        if method == "die":
            self.alive = False
            raise WorkerError("child ended: exit code 1")
        if method == "hang":
            await asyncio.sleep(deadline_s)
            self.alive = False
            self.release.set()
            raise TimeoutError
        if method == "wait":
            await self.release.wait()
            if not self.alive:
                raise WorkerError("child ended: it was killed")
        if method == "raise":
            raise ChildError("ValueError: no")
        return self.index

    async def close(self) -> None:
        self.alive, self.closed = False, True


class Starter:
    """Starts fakes, and remembers them."""

    def __init__(self) -> None:
        self.started: list[Fake] = []
        self.error: Exception | None = None

    async def __call__(self, index: int) -> Child:
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        self.started.append(Fake(index))
        return self.started[-1]


def with_pool(work: Callable[[ChildPool, Starter], Awaitable[None]], num: int = 1, calls: int = 1) -> None:
    """Run `work` with a pool of fakes, started."""

    async def run() -> None:
        starter = Starter()
        pool = ChildPool(starter, num, calls)
        await pool.start()
        await work(pool, starter)
        await pool.close()
        assert all(child.closed for child in starter.started)

    asyncio.run(run())


async def ask(pool: ChildPool, method: str = "index", who: str = "x", **more: Any) -> Any:
    return await pool.call(method, who=who, deadline_s=0.05, **more)


def test_calls_take_the_child_with_room_and_wait_when_there_is_none() -> None:
    async def work(pool: ChildPool, starter: Starter) -> None:
        waiting = [asyncio.create_task(ask(pool, "wait")) for _ in range(2)]
        third = asyncio.create_task(ask(pool))
        await asyncio.sleep(0.01)
        assert [child.calls for child in starter.started] == [["wait"], ["wait"]]
        starter.started[1].release.set()
        assert await third == 1, "the first to have room takes it"
        starter.started[0].release.set()
        assert await asyncio.gather(*waiting) == [0, 1]

    with_pool(work, num=2)


def test_an_evaluation_comes_before_training_and_waiting_is_timed() -> None:
    async def run() -> None:
        starter, queued = Starter(), Stopwatch()
        pool = ChildPool(starter, 1, 1, queued)
        await pool.start()
        first = asyncio.create_task(ask(pool, "wait"))
        await asyncio.sleep(0)
        lanes = (Lane.TRAIN, Lane.TRAIN, Lane.EVAL)
        others = [asyncio.create_task(ask(pool, lane.value, lane=lane)) for lane in lanes]
        await asyncio.sleep(0.03)
        starter.started[0].release.set()
        await asyncio.gather(first, *others)
        assert starter.started[0].calls == ["wait", "eval", "train", "train"]
        assert queued.take() >= 0.02
        await pool.close()

    asyncio.run(run())


def test_a_call_that_needs_what_a_child_holds_goes_there_and_learns_that_it_is_lost() -> None:
    async def work(pool: ChildPool, starter: Starter) -> None:
        slot = pool.pick()
        held = slot.generation
        assert [await ask(pool, slot=slot, generation=held) for _ in range(3)] == [slot.index] * 3
        with pytest.raises(WorkerError, match="exit code 1"):
            await ask(pool, "die", slot=slot, generation=held)
        assert not slot.alive
        with pytest.raises(LostProcess, match=r"^tool lost what it held: the process it was in has ended$"):
            await ask(pool, who="tool", slot=slot, generation=held)
        assert await ask(pool, slot=slot) == slot.index, "without a generation the new child serves"
        assert (pool.num_restarts, slot.generation, slot.alive) == (1, 1, True)

    with_pool(work, num=2)


def test_the_slot_with_the_fewest_calls_is_picked() -> None:
    async def work(pool: ChildPool, starter: Starter) -> None:
        slots = [pool.pick()]
        running = [asyncio.create_task(ask(pool, "wait", slot=slots[0])) for _ in range(2)]
        await asyncio.sleep(0)
        slots.append(pool.pick())
        running.append(asyncio.create_task(ask(pool, "wait", slot=slots[1])))
        await asyncio.sleep(0)
        assert [slot.index for slot in slots] == [0, 1]
        assert pool.pick() is slots[1], "a call waits for the other"
        for child in starter.started:
            child.release.set()
        assert await asyncio.gather(*running) == [0, 0, 1]

    with_pool(work, num=2)


def test_the_error_of_a_call_names_the_other_call_that_killed_its_process() -> None:
    async def work(pool: ChildPool, starter: Starter) -> None:
        innocent = asyncio.create_task(ask(pool, "wait"))
        with pytest.raises(TimeoutError):
            await ask(pool, "hang", who="agent")
        with pytest.raises(LostProcess) as lost:
            await innocent
        assert str(lost.value) == "the process it ran in was killed: agent took longer than 0.05 s, in another call"
        with pytest.raises(WorkerError) as died:
            await ask(pool, "die")
        assert not isinstance(died.value, LostProcess), "the guilt of a child ends with it"

    with_pool(work, calls=2)


def test_what_a_method_raises_leaves_its_child_alone() -> None:
    async def work(pool: ChildPool, starter: Starter) -> None:
        with pytest.raises(ChildError, match="no"):
            await ask(pool, "raise")
        assert await ask(pool) == 0
        assert len(starter.started) == 1

    with_pool(work)


def test_a_child_that_cannot_be_replaced_is_tried_again_with_the_next_call() -> None:
    async def work(pool: ChildPool, starter: Starter) -> None:
        with pytest.raises(WorkerError):
            await ask(pool, "die")
        starter.error = ChildError("ImportError: gone")
        with pytest.raises(RestartError, match="cannot be started again: ImportError: gone"):
            await ask(pool)
        starter.error = None
        assert await ask(pool) == 0

    with_pool(work)


def test_the_first_child_can_be_asked_before_the_others_start() -> None:
    async def run() -> None:
        starter = Starter()
        pool = ChildPool(starter, 3)
        child: Any = await pool.first()
        assert (child.index, len(starter.started)) == (0, 1)
        await pool.start()
        assert sorted(child.index for child in starter.started) == [0, 1, 2]
        await pool.close()

    asyncio.run(run())


def test_a_call_that_is_cancelled_as_its_turn_comes_gives_its_place_back() -> None:
    async def run() -> None:
        queue = SlotQueue([Slot(1)], Stopwatch())
        slot = await queue.take(urgent=False)
        waiting = asyncio.create_task(queue.take(urgent=False))
        await asyncio.sleep(0)
        queue.give_back(slot)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        assert queue.take_now() is slot

    asyncio.run(run())


def test_after_close_nothing_starts() -> None:
    async def run() -> None:
        starter = Starter()
        pool = ChildPool(starter, 1)
        starting = asyncio.create_task(pool.start())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await pool.close()
        with pytest.raises(WorkerError, match="closed while it was started"):
            await starting
        with pytest.raises(WorkerError, match="x: was called after its processes were closed"):
            await ask(pool)
        assert all(child.closed for child in starter.started)

    asyncio.run(run())


def test_a_real_child_that_dies_is_replaced() -> None:
    async def run() -> None:
        children = ChildProcesses()

        async def start(index: int) -> Child:
            return await children.start("collections:Counter", name=f"counter {index}")

        pool = ChildPool(start, 1)
        assert await pool.call("__len__", who="len", deadline_s=5.0) == 0
        with pytest.raises(TimeoutError):
            await pool.call("__len__", who="len", deadline_s=0.0)
        assert await pool.call("__len__", who="len", deadline_s=5.0) == 0
        assert pool.num_restarts == 1
        await pool.close()
        assert children.pids == []
        await children.close()

    asyncio.run(run())


def test_without_a_cluster_no_child_starts() -> None:
    with pytest.raises(WorkerError, match="nothing here starts children"):
        asyncio.run(NoChildren().start("collections:Counter", name="x"))
