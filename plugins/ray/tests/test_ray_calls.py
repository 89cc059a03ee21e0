"""Calls of actors on Ray: what is sent, stored and cancelled."""

import asyncio
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlcore.errors import WorkerError

pytestmark = [pytest.mark.real, pytest.mark.timeout(300), pytest.mark.xdist_group("machine")]


def test_a_call_that_is_cancelled_before_its_turn_is_never_begun() -> None:
    pytest.importorskip("ray")
    from rlcore_ray.actor import CANCELLED, FAILED, ActorHost
    from rlcore_ray.sealed import Sealed

    async def story() -> list[Any]:
        host, nothing = ActorHost([], "."), Sealed(((), {}))
        second = asyncio.ensure_future(host.call(1, "probe", "where", nothing))
        await asyncio.sleep(0)
        await host.cancel(1)
        first = await host.call(0, "stranger", "where", nothing)
        return [first[0], await asyncio.wait_for(second, 10)]

    assert asyncio.run(story()) == [FAILED, CANCELLED]


def test_a_cancelled_call_that_never_arrives_holds_up_no_other_and_a_late_one_is_not_begun() -> None:
    pytest.importorskip("ray")
    from rlcore_ray.actor import CANCELLED, FAILED, ActorHost
    from rlcore_ray.sealed import Sealed

    async def story() -> list[Any]:
        host, nothing = ActorHost([], "."), Sealed(((), {}))
        third = asyncio.ensure_future(host.call(2, "stranger", "where", nothing))
        await asyncio.sleep(0)
        await host.cancel(1)
        await host.cancel(0)
        answers = [await asyncio.wait_for(third, 10)]
        answers += [await asyncio.wait_for(host.call(1, "stranger", "where", nothing), 10)]
        await host.cancel(3)
        answers += [await asyncio.wait_for(host.call(4, "stranger", "where", nothing), 10)]
        return [answers[0][0], answers[1], answers[2][0]]

    assert asyncio.run(story()) == [FAILED, CANCELLED, FAILED]


def test_only_the_first_rank_sends_results_but_all_send_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    from rlcore_ray.actor import FAILED, OK, ActorHost
    from rlcore_ray.sealed import Sealed

    async def call(role: str, method: str, args: tuple[str], kwargs: dict[str, Any]) -> str:
        if args[0] == "fail":
            raise WorkerError("only here")
        return args[0]

    async def story() -> list[Any]:
        host = ActorHost([], ".")
        monkeypatch.setattr(host._host, "call", call)
        first = await host.call(0, "probe", "echo", Sealed((("large",), {})), True)
        second = await host.call(1, "probe", "echo", Sealed((("large",), {})), False)
        third = await host.call(2, "probe", "echo", Sealed((("fail",), {})), False)
        return [first[0], first[1].opened(), second[0], second[1].opened(), third[0]]

    assert asyncio.run(story()) == [OK, "large", OK, None, FAILED]


def test_an_array_crosses_as_a_buffer_and_arrives_read_only() -> None:
    pytest.importorskip("ray")
    from rlcore_ray.sealed import Sealed

    buffers: list[pickle.PickleBuffer] = []
    sent = np.arange(1000.0)
    payload = pickle.dumps(Sealed({"array": sent, "text": "word"}), protocol=5, buffer_callback=buffers.append)
    assert len(payload) < 1000, "neither the array nor the pickle around it is copied into the message"
    assert any(
        np.shares_memory(np.frombuffer(buffer), sent) for buffer in buffers if buffer.raw().nbytes == sent.nbytes
    )
    arrived = pickle.loads(payload, buffers=[bytes(buffer.raw()) for buffer in buffers]).opened()
    assert arrived["text"] == "word"
    assert np.array_equal(arrived["array"], sent)
    assert not arrived["array"].flags.writeable


def test_an_actor_imports_in_the_controllers_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    from rlcore_ray.actor import ActorHost

    fork, package, rest = (str(tmp_path / name) for name in ("fork", "package", "rest"))
    for directory in (fork, package, rest):
        Path(directory).mkdir()
    before = list(sys.path)
    monkeypatch.setattr(sys, "path", [*before, package, rest])
    ActorHost([fork, str(tmp_path / "nowhere"), package], ".")
    assert sys.path == [fork, package, *before, rest]


EXITING = """
import asyncio, threading, time
from rlcore.contracts.clusters import Shipment
from rlcore_ray.actor import ActorHost

async def leave():
    raise SystemExit(5)

loop = asyncio.new_event_loop()
threading.Thread(target=loop.run_forever, daemon=True).start()
asyncio.run_coroutine_threadsafe(ActorHost([], ".").build(Shipment("probe[0]", "probe", "", (), b"")), loop).result(30)
loop.call_soon_threadsafe(lambda: loop.create_task(leave()))
time.sleep(30)
"""


def test_an_actor_ends_with_its_loop() -> None:
    pytest.importorskip("ray")
    ended = subprocess.run([sys.executable, "-c", EXITING], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1, ended.stderr
    assert "rlcore: the event loop has ended" in ended.stderr


class Called:
    """An actor that notes what it is called with, and answers."""

    def __init__(self) -> None:
        self.taken: list[tuple[Any, ...]] = []
        self.call = self

    def remote(self, *arguments: Any) -> Any:
        from rlcore_ray.sealed import Sealed

        self.taken.append(arguments)
        answer = asyncio.get_running_loop().create_future()
        answer.set_result(("ok", Sealed("done")))
        return answer


def test_a_batch_for_several_ranks_is_stored_once_while_the_loop_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    from rlcore_ray.body import ActorBody

    stored, runs = [], threading.Event()

    def put(value: Any) -> str:
        assert runs.wait(10), "the loop waits for the object store"
        stored.append(value.opened())
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


def test_an_error_of_ray_about_a_task_is_no_death_of_its_actor() -> None:
    pytest.importorskip("ray")
    from ray.exceptions import RayTaskError
    from rlcore_ray.body import ActorBody

    class Failing(Called):
        """An actor whose task Ray ends with an error."""

        def __init__(self) -> None:
            super().__init__()
            self.cancel = SimpleNamespace(remote=self.taken.append)

        def remote(self, *arguments: Any) -> Any:
            answer = asyncio.get_running_loop().create_future()
            answer.set_exception(RayTaskError("ActorHost.call()", "\x1b[36mtrace", ValueError("lost")))
            return answer

    async def story() -> tuple[str, bool, list[Any]]:
        output: Any = SimpleNamespace()
        actor = Failing()
        body = ActorBody("probe[0]", [actor], output)
        with pytest.raises(WorkerError) as raised:
            await body.call("probe", "where", (), {}, "probe[0].where()", 10)
        return str(raised.value), body.alive, actor.taken

    assert asyncio.run(story()) == ("probe[0].where(): ValueError: lost", True, [0])
