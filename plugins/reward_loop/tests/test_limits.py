"""Slots, rates, routing, statistics and batches, one by one."""

import asyncio
import threading
import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rlcore_reward_loop.client.limits import ConcurrencyLimiter, FairQueue, RateLimiter
from rlcore_reward_loop.client.router import NoTarget, Router
from rlcore_reward_loop.models.batching import Batcher

from rlcore.aio import Stopwatch
from rlcore.errors import WorkerError
from rlcore.types import Lane


def test_evaluation_has_its_own_slots_and_goes_first_in_the_queue() -> None:
    order: list[str] = []

    async def run() -> None:
        gate, release = ConcurrencyLimiter(2, 1, False, Stopwatch()), asyncio.Event()

        async def call(name: str, lane: Lane) -> None:
            async with gate.slot(lane):
                order.append(name)
                await release.wait()

        calls = [("t1", Lane.TRAIN), ("t2", Lane.TRAIN), ("t3", Lane.TRAIN), ("e1", Lane.EVAL), ("e2", Lane.EVAL)]
        tasks = [asyncio.create_task(call(*value)) for value in calls]
        await asyncio.sleep(0)
        assert order == ["t1", "t2", "e1"]
        release.set()
        await asyncio.gather(*tasks)
        assert sum(gate.num_in_flight.values()) == 0
        assert gate.most_in_flight == 3

    asyncio.run(run())
    assert order[3:] == ["e2", "t3"]


def test_a_waiter_that_is_cancelled_leaves_no_slot_taken() -> None:
    async def run() -> None:
        gate = ConcurrencyLimiter(1, 1, False, Stopwatch())
        async with gate.slot(Lane.TRAIN):
            waiting = [asyncio.create_task(gate.slot(Lane.TRAIN).__aenter__()) for _ in range(3)]
            await asyncio.sleep(0)
            waiting[0].cancel()
            await asyncio.sleep(0)
        waiting[1].cancel()  # its turn has come already
        await asyncio.gather(*waiting[:2], return_exceptions=True)
        await waiting[2]
        assert gate.num_in_flight[Lane.TRAIN] == 1

    asyncio.run(run())


def test_overload_halves_the_concurrency_once_and_answers_raise_it_again() -> None:
    gate = ConcurrencyLimiter(64, 16, True, Stopwatch())
    for _ in range(5):
        gate.overloaded()
    assert gate.limit == 32
    for _ in range(32):
        gate.served()
    assert 32.9 < gate.limit < 33
    for _ in range(5000):
        gate.served()
    assert gate.limit == 64


@pytest.mark.slow
@given(st.floats(30, 6000), st.lists(st.floats(0, 0.3), min_size=30, max_size=120))
@settings(max_examples=60, deadline=None)
def test_no_second_sees_more_turns_than_the_pace_allows(per_minute: float, idle: list[float]) -> None:
    now = 100.0
    limiter = RateLimiter(per_minute, lambda: now)
    turns: list[float] = []
    for pause in idle:
        now += pause
        now += limiter.wait_s()
        limiter.begin()
        turns.append(now)
    most = max(sum(start <= turn < start + 1 for turn in turns) for start in turns)
    assert most <= per_minute / 60 * (1 + 0.05) + 1 + 1e-6


def test_turns_are_counted_in_tokens_too_and_put_right_afterwards() -> None:
    now = 0.0
    limiter = RateLimiter(600, lambda: now)
    limiter.begin(20)
    assert limiter.wait_s() == pytest.approx(2.0 - (0.1 - 0.1))
    limiter.correct(-10)
    assert limiter.wait_s() == pytest.approx(1.0)
    assert RateLimiter(0, lambda: now).wait_s() == 0.0


def test_waiting_calls_continue_as_if_the_tokens_had_been_known_from_the_start() -> None:
    """600 tokens per minute are ten per second. A call reserves 100 tokens at 0 s and uses only 20. So three more
    calls of ten tokens were due before 5 s, and one is due then."""
    now = 0.0

    async def run() -> None:
        nonlocal now
        turns = FairQueue(RateLimiter(0), RateLimiter(600, lambda: now))
        assert turns.now(100)
        waiting = [asyncio.create_task(turns.turn(Lane.TRAIN, 10)) for _ in range(6)]
        await asyncio.sleep(0)
        now = 5.0
        assert not turns.now(1)
        turns.correct(-80)
        await asyncio.sleep(0)
        assert [waiter.done() for waiter in waiting] == [True] * 4 + [False] * 2
        turns.correct(-10)
        await asyncio.sleep(0)
        assert [waiter.done() for waiter in waiting] == [True] * 5 + [False]
        assert turns.for_tokens.take() > 0
        assert turns.for_requests.take() == 0
        waiting[5].cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        turns.correct(-40)  # no call waits any more, so none has lost time
        now = 6.0
        assert turns.now(10)
        assert not turns.now(10)
        turns.close()

    asyncio.run(run())


@given(st.lists(st.tuples(st.floats(0, 2), st.integers(1, 50), st.integers(1, 50)), min_size=5, max_size=60))
@settings(max_examples=60, deadline=None)
def test_what_was_begun_never_gets_ahead_of_the_true_tokens(calls: list[tuple[float, int, int]]) -> None:
    """Each call is put right before the next one begins: ten tokens per second, as a plain sum counts them."""
    now = spread_s = 0.0
    limiter = RateLimiter(600, lambda: now)
    for took_s, estimate, true in calls:
        now += limiter.wait_s()
        assert now >= spread_s - 1e-9
        limiter.begin(estimate)
        spread_s += true / 10
        now += took_s
        limiter.correct(true - estimate)


@pytest.mark.slow
def test_evaluation_takes_the_next_turn() -> None:
    async def run() -> list[str]:
        turns, order = FairQueue(RateLimiter(1200), RateLimiter(0)), []

        async def call(name: str, lane: Lane) -> None:
            await turns.turn(lane, 1.0)
            order.append(name)

        named = [(f"t{index}", Lane.TRAIN) for index in range(4)] + [("e", Lane.EVAL)]
        await asyncio.gather(*(call(*pair) for pair in named))
        return order

    assert asyncio.run(run()) == ["t0", "e", "t1", "t2", "t3"]


def test_a_failing_target_is_left_alone_until_one_call_finds_it_well_again() -> None:
    async def run() -> None:
        router = Router(["a", "b"], eject_after=2, pause_s=600)
        due = time.monotonic() + 20
        a, b = router.targets
        for witness in range(2):
            assert router.num_ejected == 0
            router.failed(*(await router.take(due, avoid=b)), "answered 503", witness)
        assert router.num_ejected == 1
        assert {(await router.take(due))[0].name for _ in range(5)} == {"b"}
        a.ejected_until = time.monotonic()  # its pause is over
        trial = await router.take(due, avoid=b)
        assert trial[0] is a
        assert (await router.take(due, avoid=b))[0] is b  # one trial at a time
        router.succeeded(*trial)
        assert router.num_ejected == 0

    asyncio.run(run())


def test_a_target_that_asked_for_it_is_left_alone_while_there_are_others() -> None:
    async def run() -> None:
        router = Router(["a", "b"], eject_after=5, pause_s=600)
        due = time.monotonic() + 20
        a, b = router.targets
        router.failed(*(await router.take(due, avoid=b)), "answered 429", "me", 600.0)
        assert 0 < a.rests_until - time.monotonic() <= 60
        assert {(await router.take(due))[0].name for _ in range(5)} == {"b"}
        assert router.has_other(a)
        assert not router.has_other(b)
        router.failed(*(await router.take(due, avoid=a)), "answered 429", "me", 600.0)
        assert not router.has_other(a)
        assert (await router.take(due))[0] is a, "both rest, and b has five calls"

    asyncio.run(run())


def test_a_refused_call_says_that_the_target_is_there_and_not_how_fast_it_is() -> None:
    async def run() -> None:
        router = Router(["a", "b"], eject_after=2, pause_s=600)
        due = time.monotonic() + 20
        a, b = router.targets
        router.failed(*(await router.take(due, avoid=b)), "answered 503", 0)
        router.refused(*(await router.take(due, avoid=b)))
        router.failed(*(await router.take(due, avoid=b)), "answered 503", 1)
        assert router.num_ejected == 0, "two failures, not in a row"
        assert a.latency_s == 0.0
        assert not a.calls

    asyncio.run(run())


def test_a_call_that_finds_every_target_out_of_use_for_longer_than_it_may_wait_says_why() -> None:
    async def run() -> None:
        async def probe(target: object) -> bool:
            return False

        router = Router(["a"], eject_after=1, pause_s=0.01, probe=probe)
        router.failed(*(await router.take(time.monotonic() + 1)), "died")
        with pytest.raises(NoTarget, match="a: died"):
            await router.take(time.monotonic() + 0.1)
        await router.close()

    asyncio.run(run())


def test_one_sample_ejects_no_target_however_often_it_is_retried() -> None:
    async def run() -> None:
        router = Router(["a", "b"], eject_after=2, pause_s=600)
        for _ in range(10):
            router.failed(*(await router.take(time.monotonic() + 1, avoid=router.targets[1])), "reset", "the sample")
        assert router.num_ejected == 0
        router.failed(*(await router.take(time.monotonic() + 1, avoid=router.targets[1])), "reset", "another")
        assert router.num_ejected == 1

    asyncio.run(run())


def test_the_last_address_stays_in_use() -> None:
    async def run() -> None:
        router = Router(["a", "b"], eject_after=2, pause_s=600)
        for witness in range(20):
            router.failed(*(await router.take(time.monotonic() + 1)), "answered 503", witness)
        assert router.num_ejected == 1
        alone = Router(["a"], eject_after=1, pause_s=600)
        for witness in range(5):
            alone.failed(*(await alone.take(time.monotonic() + 1)), "answered 503", witness)
        assert alone.num_ejected == 0

    asyncio.run(run())


def test_a_healthy_probe_brings_a_target_back_and_waiting_calls_continue() -> None:
    answers = iter([False, True])

    async def probe(target: object) -> bool:
        return next(answers)

    async def run() -> None:
        router = Router(["a"], eject_after=1, pause_s=0.01, probe=probe)
        due = time.monotonic() + 20
        router.failed(*(await router.take(due)), "died")
        assert (await router.take(due))[0].name == "a"
        assert router.num_ejected == 0
        await router.close()

    asyncio.run(run())


def test_a_batch_is_whatever_is_queued_up_to_the_budget_and_never_waits_to_be_full() -> None:
    batches: list[list[int]] = []

    def compute(rows: list[Sequence[int]]) -> list[float]:
        batches.append([len(row) for row in rows])
        return [float(sum(row)) for row in rows]

    async def run() -> None:
        batcher = Batcher(compute, batch_tokens=40, wait_s=0.01)
        rows = [[1] * length for length in (10, 10, 20, 10, 50, 3)]
        scores = await asyncio.gather(*(batcher.score(row) for row in rows))
        assert scores == [10, 10, 20, 10, 50, 3]
        assert await batcher.score([7]) == 7
        batcher.close()

    asyncio.run(run())
    assert batches == [[10, 10], [20, 10], [50], [3], [1]]
    assert all(len(batch) * max(batch) <= 40 or len(batch) == 1 for batch in batches)


def test_what_a_batch_raises_reaches_its_rows_and_the_next_batch_is_computed() -> None:
    def compute(rows: list[Sequence[int]]) -> list[float]:
        if any(13 in row for row in rows):
            raise RuntimeError("out of memory")
        return [1.0] * len(rows)

    async def run() -> None:
        batcher = Batcher(compute, batch_tokens=2, wait_s=0.0)
        found = await asyncio.gather(*(batcher.score([id, id]) for id in (1, 13, 2)), return_exceptions=True)
        assert [str(result) for result in found] == ["1.0", "out of memory", "1.0"]
        await batcher.drained()
        batcher.close()

    asyncio.run(run())


def test_a_model_that_hangs_or_fails_is_found_out_by_a_row_of_one_token() -> None:
    hangs, release, batches = threading.Event(), threading.Event(), list[list[Sequence[int]]]()

    def compute(rows: list[Sequence[int]]) -> list[float]:
        batches.append(rows)
        if [13] in rows:
            raise RuntimeError("device lost")
        if [99] in rows:
            hangs.set()
            release.wait(20)
        return [1.0] * len(rows)

    async def run() -> None:
        batcher = Batcher(compute, batch_tokens=1, wait_s=0.0)
        await batcher.probe(7, limit_s=10.0)
        with pytest.raises(WorkerError, match="a row of one token: RuntimeError: device lost"):
            await batcher.probe(13, limit_s=10.0)
        hanging, queued = (asyncio.create_task(batcher.score([number])) for number in (99, 5))
        assert await asyncio.to_thread(hangs.wait, 20.0)
        with pytest.raises(WorkerError, match=r"a row of one token was not computed within 0\.05 s"):
            await batcher.probe(7, limit_s=0.05)
        ahead = asyncio.create_task(batcher.probe(8, limit_s=20.0))
        await asyncio.sleep(0)
        release.set()
        await asyncio.gather(hanging, queued, ahead)
        assert batches == [[[7]], [[13]], [[99]], [[8]], [[5]]]
        await batcher.drained()
        batcher.close()

    asyncio.run(run())


def test_a_target_that_is_new_among_known_ones_is_not_asked_everything_at_once() -> None:
    async def run() -> None:
        router = Router(["old", "new"], 1, 1.0)
        old, new = router.targets
        old.latency_s = 100.0  # far above what this test takes
        taken = [await router.take(time.monotonic() + 1.0) for _ in range(30)]
        assert {target.name for target, _ in taken} == {"old", "new"}
        assert 10 <= len(new.calls) <= 20

    asyncio.run(run())


def test_a_call_that_began_before_the_ejection_does_not_end_the_test_of_the_target() -> None:
    async def run() -> None:
        router = Router(["a", "b"], eject_after=2, pause_s=600)
        due = time.monotonic() + 20
        a, b = router.targets
        olders = [await router.take(due, avoid=b) for _ in range(2)]
        for witness in range(2):
            router.failed(*(await router.take(due, avoid=b)), "answered 503", witness)
        a.ejected_until = time.monotonic()
        trial = await router.take(due, avoid=b)
        assert trial[0] is a
        router.dropped(*olders[0])
        assert (await router.take(due, avoid=b))[0] is b
        router.failed(*olders[1], "answered 503", "another")
        assert (await router.take(due, avoid=b))[0] is b
        assert router.num_ejections == 1, "the older call says nothing that was not known"
        router.succeeded(*trial)
        assert router.num_ejected == 0

    asyncio.run(run())
