"""Errors of workers name the plugin that offered their class; others stay what they are."""

import asyncio
import functools
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rlcore.contracts.rollout import RolloutWorker
from rlcore.contracts.workers import Worker
from rlcore.errors import PluginError, RewardError, RlcoreError, WorkerError, worker_call
from rlcore.plan import CORE
from rlcore.runtime.colocation import DeviceLease
from rlcore.runtime.offering_plugin import naming_offers
from rlcore.runtime.rollout_service import RolloutService
from rlcore.runtime.utilization import BusyMeter
from rlcore.runtime.weight_sync import WeightsSync
from rlcore.types import GenerateRequest, Sampling


class Judge(Worker):
    """Stands for a worker class."""

    def ask(self) -> None:
        """A call."""

    async def watch(self) -> AsyncIterator[int]:
        """A stream."""
        yield 0


def planned(role: str, provided_by: str) -> Any:
    request = SimpleNamespace(role=SimpleNamespace(name=role))
    return SimpleNamespace(request=request, offered_by=f"Judge of {provided_by}", provided_by=provided_by)


X = "plugin 'x' (x 1.0)"
PLAN: Any = SimpleNamespace(workers=[planned("judge", X), planned("actor", f"plugin '{CORE}' (rlcore 1.0)")])
OFFER = f"Judge of {X}"
NAMED = f"; its class is {OFFER}"


def raised(error: RlcoreError, role: str, offered_by: str = "") -> None:
    if not role:
        raise error
    with worker_call(role, "ask", offered_by):
        raise error


def caused(error: RlcoreError, cause: RlcoreError, role: str) -> None:
    try:
        raised(cause, role)
    except RlcoreError as found:
        raise error from found


def called_by(error: RlcoreError) -> tuple[str, str, str]:
    return error.role, error.method, error.offered_by


@pytest.mark.parametrize("error", [WorkerError, PluginError, RewardError])
def test_an_error_of_a_worker_says_whose_class_it_is(error: type[RlcoreError]) -> None:
    with pytest.raises(error) as caught, naming_offers(PLAN):
        raised(error("it returned None; needs int"), "judge")
    assert str(caught.value) == "it returned None; needs int" + NAMED
    assert type(caught.value) is error
    assert called_by(caught.value) == ("judge", "ask", OFFER)


def test_an_error_that_another_worker_error_caused_says_whose_class_that_is() -> None:
    with pytest.raises(PluginError) as caught, naming_offers(PLAN):
        caused(PluginError("agent 'a': it failed"), WorkerError("KeyError: 'x'"), "judge")
    assert str(caught.value) == "agent 'a': it failed" + NAMED
    assert called_by(caught.value) == ("judge", "ask", OFFER)


@pytest.mark.parametrize(
    ("text", "role"),
    [
        ("actor[0].update() returned None", "actor"),
        ("judge[0].score() returned None, said a text", ""),
        ("critics[0] is missing", "critics"),
        ("judge[0]: of plugin 'x' (x 1.0), lost", "judge"),
    ],
)
def test_other_errors_and_those_of_the_core_stay_what_they_are(text: str, role: str) -> None:
    with pytest.raises(WorkerError) as caught, naming_offers(PLAN):
        raised(WorkerError(text), role)
    assert str(caught.value) == text


def test_the_call_that_raised_an_error_is_not_replaced_by_those_around_it() -> None:
    error = WorkerError("no")
    with pytest.raises(WorkerError), worker_call("agent", "rollout", "Loop of core"):
        raised(error, "judge", OFFER)
    assert called_by(error) == ("judge", "ask", OFFER)


class Failing:
    """A replica each call of which fails; with an answer it gives that."""

    name, alive = "rollout[0]", True

    def __init__(self, answer: Any = None) -> None:
        self.answer = answer

    async def call(self, method: Callable[..., Any], *args: Any) -> Any:
        if self.answer is not None:
            return await self.answer() if callable(self.answer) else self.answer
        raise PluginError("it failed")

    async def stream(self, method: Callable[..., Any], *args: Any) -> AsyncIterator[Any]:
        if self.answer is not None:
            yield self.answer
        raise WorkerError("it failed")


class Group:
    """A group of one."""

    def __init__(self, answer: Any = None) -> None:
        self.replicas = (Failing(answer),)

    async def each(self, method: Callable[..., Any]) -> Any:
        raise WorkerError("it failed")

    def on_event(self, callback: Any) -> None:
        """Nothing happens to it."""

    before_launch = before_return = on_event


async def consumed(stream: Any) -> None:
    async for _ in stream:
        pass


def failure(work: Any) -> RlcoreError:
    with pytest.raises(RlcoreError) as caught:
        asyncio.run(work())
    return caught.value


def test_errors_of_calls_streams_and_calls_of_all_say_role_method_and_offer() -> None:
    group = BusyMeter({}).metered("judge", Group(), OFFER)  # type: ignore[arg-type]
    replica = group.replicas[0]
    assert called_by(failure(functools.partial(replica.call, Judge.ask))) == ("judge", "ask", OFFER)
    assert called_by(failure(functools.partial(group.each, Judge.ask))) == ("judge", "ask", OFFER)
    watched = failure(lambda: consumed(replica.stream(Judge.watch)))
    assert called_by(watched) == ("judge", "watch", OFFER)


def test_what_the_core_finds_wrong_in_an_answer_is_an_error_of_that_call() -> None:
    async def generate() -> None:
        service = RolloutService(Group("no completion"), deadline_s=1.0)  # type: ignore[arg-type]
        request = GenerateRequest("a", (1,), Sampling(max_tokens=1), 1, 0)
        await consumed(service.generate([request], "train"))  # type: ignore[arg-type]

    found = failure(generate)
    assert "yielded str" in str(found)
    assert called_by(found)[:2] == ("rollout", "generate")


def test_a_server_that_does_not_fall_asleep_is_an_error_of_that_call() -> None:
    async def lease() -> None:
        servers: Any = [("judge", Group(functools.partial(asyncio.sleep, 60)), RolloutWorker)]
        await DeviceLease(servers, lambda name, value: None, deadline_s=0.01).train()

    assert called_by(failure(lease))[:2] == ("judge", "sleep")


def test_a_wrong_version_after_a_hand_over_is_an_error_of_that_call(tmp_path: Any) -> None:
    async def publish() -> None:
        handle = SimpleNamespace(path=tmp_path, version=3, kind="disk")
        sync = WeightsSync(Group(handle), Group(2), tmp_path)  # type: ignore[arg-type]
        await sync.publish(3)

    assert called_by(failure(publish))[:2] == ("rollout", "load_weights")
