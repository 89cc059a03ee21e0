"""Calls of a service wait for identical ones, the rate and slots, and metrics say so."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rlcore_reward_loop.client.http import NoAnswer
from rlcore_reward_loop.client.service import Call, Service
from rlcore_reward_loop.settings import RewardLoopSettings, ServiceSettings

from rlcore.aio import Stopwatch
from rlcore.contracts.call_log import CallLog
from rlcore.contracts.reward_manager import BOUND_BY
from rlcore.plan import OldLogprobs, SchedulePlan
from rlcore.report.advice import advice
from rlcore.testing.rewards import make_trajectory
from rlcore.testing.service import ServiceAnswer, ServiceCall, serving
from rlcore.types import Lane, Metrics

WHERE = "plugins.reward_loop.services.scorer"


@contextmanager
def service_at(url: str, tmp_path: Path, **settings: Any) -> Iterator[Callable[..., Any]]:
    """Runs a coroutine function with the started service."""
    audit = CallLog(tmp_path, "none", 1)

    def run(use: Callable[[Service], Awaitable[None]]) -> None:
        async def main() -> None:
            service = Service("scorer", ServiceSettings(urls=(url,), **settings), audit, Stopwatch())
            await service.start()
            try:
                async with asyncio.timeout(20):
                    await use(service)
            finally:
                await service.close()

        asyncio.run(main())

    yield run
    audit.close()


def call(text: str = "same") -> Call:
    return Call("helpful", "p/0/0", {"text": text})


def test_a_failure_is_shared_with_no_identical_call_and_an_answer_with_all(tmp_path: Path) -> None:
    def script(call: ServiceCall) -> ServiceAnswer:
        return ServiceAnswer(status=400, after_s=0.02) if call.times == 1 else ServiceAnswer({"score": 1}, after_s=0.02)

    async def use(service: Service) -> None:
        found = await asyncio.gather(*(service.ask(call(), Lane.TRAIN) for _ in range(5)), return_exceptions=True)
        assert isinstance(found[0], NoAnswer)
        assert found[1:] == [{"score": 1}] * 4
        assert service.take_counts()["num_cache_hits"] == 3

    with serving(script) as scripted, service_at(scripted.url, tmp_path, cache=8) as run:
        run(use)
    assert len(scripted.calls) == 2


def test_retries_and_cache_hits_of_an_evaluation_are_not_those_of_the_next_step(tmp_path: Path) -> None:
    def script(call: ServiceCall) -> ServiceAnswer:
        return ServiceAnswer({"score": 1}, status=503 if call.times == 1 else 200)

    async def use(service: Service) -> None:
        for lane, counted in ((Lane.EVAL, 0.0), (Lane.TRAIN, 1.0)):
            for _ in range(2):
                assert await service.ask(call(f"{lane}"), lane) == {"score": 1}
            counts = service.take_counts()
            assert (counts["num_retries"], counts["num_cache_hits"]) == (counted, counted)

    with serving(script) as scripted, service_at(scripted.url, tmp_path, cache=8) as run:
        run(use)


def test_of_identical_calls_that_all_fail_the_last_does_not_wait_for_every_other(tmp_path: Path) -> None:
    async def use(service: Service) -> None:
        found = await asyncio.gather(*(service.ask(call(), Lane.TRAIN) for _ in range(8)), return_exceptions=True)
        assert [type(result) for result in found] == [NoAnswer] * 8
        assert service.take_counts()["num_cache_hits"] == 0

    with (
        serving(lambda call: ServiceAnswer(status=400)) as scripted,
        service_at(scripted.url, tmp_path, cache=8) as run,
    ):
        run(use)
    assert len(scripted.calls) == 8


def test_an_evaluation_waits_for_no_identical_call_of_training_that_is_queued(tmp_path: Path) -> None:
    async def use(service: Service) -> None:
        assert service.limiter.enter(Lane.TRAIN), "the one slot is taken"
        queued = asyncio.create_task(service.ask(call(), Lane.TRAIN))
        await asyncio.sleep(0.01)
        assert await service.ask(call(), Lane.EVAL) == {"score": 1}
        assert not queued.done()
        service.limiter.leave(Lane.TRAIN)
        assert await queued == {"score": 1}

    with (
        serving(lambda call: ServiceAnswer({"score": 1})) as scripted,
        service_at(scripted.url, tmp_path, cache=8, concurrency=1, eval_slots=1) as run,
    ):
        run(use)
    assert len(scripted.calls) == 2


def test_an_evaluation_takes_the_answer_of_an_identical_running_call_of_training(tmp_path: Path) -> None:
    async def use(service: Service) -> None:
        training = asyncio.create_task(service.ask(call(), Lane.TRAIN))
        while not scripted.calls:
            await asyncio.sleep(0.001)
        assert await asyncio.gather(service.ask(call(), Lane.EVAL), training) == [{"score": 1}] * 2

    with (
        serving(lambda call: ServiceAnswer({"score": 1}, after_s=0.1)) as scripted,
        service_at(scripted.url, tmp_path, cache=8) as run,
    ):
        run(use)
    assert len(scripted.calls) == 1


@pytest.mark.fault
def test_no_second_at_the_service_sees_more_requests_than_the_rate(
    score: Callable[..., Any], one_service: Callable[..., RewardLoopSettings]
) -> None:
    """Scorecard case 9: 1200 per minute are 20 per second, and 30 calls take 1.45 s at least."""
    begun: list[float] = []

    async def script(call: ServiceCall) -> ServiceAnswer:
        begun.append(asyncio.get_running_loop().time())
        return ServiceAnswer({"score": 1})

    with serving(script) as service:
        results, found = score(
            one_service(service.url, requests_per_minute=1200.0), [make_trajectory(n // 4, n % 4) for n in range(30)]
        )
    assert len(results) == len(begun) == 30
    assert begun[-1] - begun[0] >= 29 / 20 - 0.05 - 0.1, "less what two turns may come late"
    # A turn may come late and not the one after it: both then lie in a window that should have had one less.
    late = 2
    assert max(sum(start <= task < start + 1.0 for task in begun) for start in begun) <= 20 * 1.05 + 1 + late
    assert bounds(found) == {f"{WHERE}.requests_per_minute"}
    assert found["time/service_bound"] == 1.0


def bounds(metrics: Metrics) -> set[str]:
    """The settings reported as the bound."""
    shares = {name: share for name, share in metrics.items() if name.startswith(BOUND_BY)}
    return {name.removeprefix(BOUND_BY) for name, share in shares.items() if share >= 0.5}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "pauses_s", "expected"),
    [
        ({"concurrency": 2}, (0.02, 0.02), {f"{WHERE}.concurrency"}),
        ({"concurrency": 2, "tokens_per_minute": 120_000.0}, (0.0, 0.0), {f"{WHERE}.tokens_per_minute"}),
        ({"concurrency": 15}, (0.2, 0.02), set()),
    ],
    ids=["slots", "tokens", "nothing"],
)
def test_what_calls_wait_for_is_named_and_nothing_that_follows_from_it(
    limit: dict[str, Any],
    pauses_s: tuple[float, float],
    expected: set[str],
    score: Callable[..., Any],
    one_service: Callable[..., RewardLoopSettings],
) -> None:
    """16 samples, of which the first two may take ten times as long as the others, that leave 13 of 15 slots free."""

    def script(call: ServiceCall) -> ServiceAnswer:
        slow = call.json()["completion"] in ("response 0", "response 1")
        return ServiceAnswer({"score": 1}, after_s=pauses_s[not slow])

    samples = [make_trajectory(n // 4, n % 4, text=f"response {n}") for n in range(16)]
    with serving(script) as service:
        _, found = score(one_service(service.url, **limit), samples, lane=Lane.TRAIN)
    assert bounds(found) == expected
    assert found["time/service_bound"] == float(bool(expected))


def test_slots_that_the_service_took_away_are_not_blamed_on_the_setting(tmp_path: Path) -> None:
    async def use(service: Service) -> None:
        service.limiter.overloaded()
        await asyncio.gather(*(service.ask(call(str(n)), Lane.TRAIN) for n in range(6)))
        waits = service.take_waits()
        assert waits[f"{WHERE}.urls"] > 0
        assert f"{WHERE}.concurrency" not in waits

    with (
        serving(lambda call: ServiceAnswer({"score": 1}, after_s=0.02)) as scripted,
        service_at(scripted.url, tmp_path, concurrency=4) as run,
    ):
        run(use)


def test_the_advice_names_the_setting_that_calls_waited_for() -> None:
    step = {"time/step_s": 1.0, "time/reward_wait_s": 0.7, "time/service_bound": 1.0}
    rate, children = "plugins.a.services.b.tokens_per_minute", "reward.functions.f.children"
    named = {f"{BOUND_BY}{rate}": 0.8, f"{BOUND_BY}{children}": 0.3}
    schedule = SchedulePlan("synchronous", 0, False, False, OldLogprobs.SAMPLED, (), True)
    message = advice([step | named], schedule, 4)[1]
    assert f"wait for {rate}, which bounds the run" in message
    assert "reward.functions" not in message
    assert "latency" not in message
