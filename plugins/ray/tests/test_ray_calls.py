"""Calls of actors on Ray: what is sent, stored and cancelled."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from rlcore.errors import WorkerError

pytestmark = [pytest.mark.real, pytest.mark.timeout(300), pytest.mark.xdist_group("machine")]


def test_a_call_that_is_cancelled_before_its_turn_is_never_begun() -> None:
    pytest.importorskip("ray")
    from rlcore_ray.actor import CANCELLED, FAILED, ActorHost

    async def story() -> list[Any]:
        host = ActorHost([], ".")
        second = asyncio.ensure_future(host.call(1, "probe", "where", ((), {})))
        await asyncio.sleep(0)
        await host.cancel(1)
        first = await host.call(0, "stranger", "where", ((), {}))
        return [first[0], await asyncio.wait_for(second, 10)]

    assert asyncio.run(story()) == [FAILED, CANCELLED]


def test_only_the_first_rank_sends_results_but_all_send_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    from rlcore_ray.actor import FAILED, OK, ActorHost

    async def call(role: str, method: str, args: tuple[str], kwargs: dict[str, Any]) -> str:
        if args[0] == "fail":
            raise WorkerError("only here")
        return args[0]

    async def story() -> list[Any]:
        host = ActorHost([], ".")
        monkeypatch.setattr(host._host, "call", call)
        first = await host.call(0, "probe", "echo", (("large",), {}), True)
        second = await host.call(1, "probe", "echo", (("large",), {}), False)
        third = await host.call(2, "probe", "echo", (("fail",), {}), False)
        return [first, second, third[0]]

    assert asyncio.run(story()) == [(OK, "large"), (OK, None), FAILED]


class Called:
    """An actor that notes what it is called with, and answers."""

    def __init__(self) -> None:
        self.taken: list[tuple[Any, ...]] = []
        self.call = self

    def remote(self, *arguments: Any) -> Any:
        self.taken.append(arguments)
        answer = asyncio.get_running_loop().create_future()
        answer.set_result(("ok", "done"))
        return answer


def test_a_batch_for_several_ranks_is_stored_once_while_the_loop_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    from rlcore_ray.body import ActorBody

    stored, runs = [], threading.Event()

    def put(value: Any) -> str:
        assert runs.wait(10), "the loop waits for the object store"
        stored.append(value)
        return "stored"

    async def story() -> tuple[list[Called], Any]:
        output: Any = SimpleNamespace()
        actors = [Called(), Called()]
        body = ActorBody("actor[0]", actors, output)
        call = asyncio.ensure_future(body.call("actor", "update", (1,), {}, "where", 10))
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_later(0.01, runs.set)
        return actors, await call

    monkeypatch.setattr(ray, "put", put)
    actors, answer = asyncio.run(story())
    assert answer == "done"
    assert stored == [((1,), {})]
    assert [actor.taken for actor in actors] == [[(0, "actor", "update", "stored", rank == 0)] for rank in range(2)]
