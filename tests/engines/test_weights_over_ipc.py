"""Weights that go from the actor to processes on its device, through buckets; on a CPU, in memory that they share."""

import gc
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import pytest

from rlcore.contracts import weight_ipc
from rlcore.contracts.weight_ipc import AT, weights_over_ipc
from rlcore.contracts.weight_memory import ADDRESSES
from rlcore.contracts.weight_stream import send_message
from rlcore.contracts.weights import weights_of
from rlcore.errors import WorkerError
from rlcore.types import WeightsHandle

torch = pytest.importorskip("torch")
ipc_server = pytest.importorskip("rlcore.engines.ipc_server")


def some_tensors(version: int = 1) -> dict[str, Any]:
    """Smaller and larger than the bucket of 1 MiB."""
    return {
        "matrix": version * torch.randn(30, 7),
        "none": torch.empty(0, 4),
        "large": (version * torch.randn(900, 1000)).bfloat16(),
        "turned": torch.randn(600, 400).T,
        "parameter": torch.nn.Parameter(torch.randn(300)),
        "number": torch.tensor(2.5 * version),
    }


def equal(found: Mapping[str, Any], tensors: Mapping[str, Any]) -> bool:
    """The same names in the same order, types and numbers."""
    return list(found) == list(tensors) and all(
        found[name].dtype == tensor.dtype and torch.equal(found[name], tensor) for name, tensor in tensors.items()
    )


@pytest.fixture
def server() -> Iterator[Any]:
    with closing(ipc_server.IpcServer("cpu", 1)) as opened:
        yield opened
    assert not [thread for thread in threading.enumerate() if thread.name == "weights"]
    gc.collect()
    assert not [name for name in os.listdir("/proc/self/fd") if "rlcore-weights" in target(name)]


def target(descriptor: str) -> str:
    """The file of a descriptor; a thread may close its own meanwhile."""
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except FileNotFoundError:
        return ""


class Replicas:
    """Processes that load a version, played by threads."""

    def __init__(self, stack: ExitStack) -> None:
        self.threads = stack.enter_context(ThreadPoolExecutor(4))

    def load(self, handle: WeightsHandle, processes: int = 1) -> "Future[dict[str, Any]]":
        return self.threads.submit(lambda: dict(weights_over_ipc(handle, processes=processes)))


@pytest.fixture
def replicas() -> Iterator[Replicas]:
    with ExitStack() as stack:
        yield Replicas(stack)


def test_every_process_of_every_replica_gets_each_tensor(server: Any, replicas: Replicas) -> None:
    for version in (1, 2):
        tensors = some_tensors(version)
        handle = WeightsHandle(version, "ipc", server.offer(), members=2)
        tasks = [replicas.load(handle, processes=2) for _ in range(4)]
        server.send(2, tensors.items())
        assert all(equal(task.result(30), tensors) for task in tasks)
        assert all(task.result()["large"].data_ptr() != tensors["large"].data_ptr() for task in tasks)


def test_a_restarted_replica_gets_the_version_again(server: Any, replicas: Replicas) -> None:
    tensors = some_tensors()
    handle = WeightsHandle(1, "ipc", server.offer(), members=1)
    for _ in range(2):
        task = replicas.load(handle)
        server.send(1, tensors.items())
        assert equal(task.result(30), tensors)


def test_the_actor_waits_until_the_bucket_is_released(server: Any, replicas: Replicas) -> None:
    """Its memory is free for the engine's cache when the hand-over ends."""
    handle, held = WeightsHandle(1, "ipc", server.offer(), members=1), threading.Event()

    def slow() -> None:
        for name, _ in weights_over_ipc(handle):
            if name == "number":
                held.wait(30)

    task = replicas.threads.submit(slow)
    sending = replicas.threads.submit(server.send, 1, some_tensors().items())
    time.sleep(0.3)
    assert not sending.done()
    held.set()
    sending.result(30)
    task.result(30)


def test_another_process_reads_the_bucket(server: Any) -> None:
    handle = WeightsHandle(1, "ipc", server.offer(), members=1)
    code = """
import sys
from rlcore.contracts.weight_stream import send_message
from rlcore.contracts.weights import weights_of
from rlcore.types import WeightsHandle
print({name: tensor.double().sum().item() for name, tensor in weights_of(WeightsHandle(1, "ipc", sys.argv[1], 1))})
"""
    child = subprocess.Popen([sys.executable, "-c", code, handle.path], stdout=subprocess.PIPE, text=True)
    tensors = some_tensors()
    server.send(1, tensors.items())
    assert child.communicate(timeout=60)[0] == f"{ {name: t.double().sum().item() for name, t in tensors.items()} }\n"


DOOMED = """
import os, signal, sys
from rlcore.contracts.weight_ipc import weights_over_ipc
from rlcore.types import WeightsHandle
for number, _ in enumerate(weights_over_ipc(WeightsHandle(1, "ipc", sys.argv[1], 2))):
    if number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_one_that_is_killed_in_the_middle_takes_no_other_with_it(server: Any, replicas: Replicas) -> None:
    tensors = some_tensors()
    handle = WeightsHandle(1, "ipc", server.offer(), members=2)
    doomed = subprocess.Popen([sys.executable, "-c", DOOMED, handle.path])
    task = replicas.load(handle)
    server.send(2, tensors.items())
    assert equal(task.result(30), tensors)
    assert doomed.wait(30) == -9


def test_one_that_stops_early_takes_no_other_with_it(server: Any, replicas: Replicas) -> None:
    tensors = some_tensors()
    handle = WeightsHandle(1, "ipc", server.offer(), members=2)

    def first() -> str:
        with closing(weights_over_ipc(handle)) as weights:
            return next(weights)[0]

    early, task = replicas.threads.submit(first), replicas.load(handle)
    server.send(2, tensors.items())
    assert early.result(30) == "matrix"
    assert equal(task.result(30), tensors)


def absent(handle: WeightsHandle, held: ExitStack) -> None:
    """It froze before it connected."""


def silent(handle: WeightsHandle, held: ExitStack) -> None:
    """It froze after it had connected, and confirms nothing."""
    connection = held.enter_context(socket.socket(socket.AF_UNIX))
    name, _, secret = handle.path.partition(AT)[2].rpartition("/")
    connection.connect(f"\0{name}")
    connection.sendall(secret.encode())
    send_message(connection, json.dumps({"members": 2, "processes": 1}).encode())


@pytest.mark.slow
@pytest.mark.parametrize("freezes", [absent, silent])
def test_one_that_hangs_keeps_no_version_from_the_others(replicas: Replicas, freezes: Any) -> None:
    tensors = some_tensors()
    with closing(ipc_server.IpcServer("cpu", 1, deadline_s=8.0)) as server, ExitStack() as held:
        handle = WeightsHandle(1, "ipc", server.offer(), members=2)
        freezes(handle, held)
        began = time.monotonic()
        task = replicas.load(handle)
        server.send(2, tensors.items())
        assert equal(task.result(30), tensors)
        assert time.monotonic() - began < 6.0, "it has the version before the deadline of 8 s"


def test_one_that_goes_while_it_waits_is_forgotten(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as held:
        silent(WeightsHandle(1, "ipc", server.offer()), held)
        until = time.monotonic() + 10
        while not server._waiting and time.monotonic() < until:
            time.sleep(0.01)
        assert len(server._waiting) == 1
    while server._waiting and time.monotonic() < until:
        time.sleep(0.01)
    assert server._waiting == []


def test_one_that_waits_for_an_old_version_gets_no_other(server: Any, replicas: Replicas) -> None:
    old = WeightsHandle(1, "ipc", server.offer(), members=1)
    late = replicas.load(old)
    until = time.monotonic() + 10
    while not server._waiting and time.monotonic() < until:
        time.sleep(0.01)
    handle = WeightsHandle(2, "ipc", server.offer(), members=1)
    task = replicas.load(handle)
    tensors = some_tensors(2)
    server.send(1, tensors.items())
    assert equal(task.result(30), tensors)
    with pytest.raises(WorkerError, match=r"over IPC from '.*', which waits .*: EOFError: .*has other weights by now"):
        late.result(30)
    with pytest.raises(WorkerError, match="has other weights by now"):
        replicas.load(old).result(30)


def test_one_whose_version_is_replaced_while_it_connects_gets_nothing(server: Any) -> None:
    server.offer()
    stale, (here, there) = server._waiting, socket.socketpair()
    with here, there:
        server.offer()
        send_message(there, json.dumps({"members": 1, "processes": 1}).encode())
        serving = threading.Thread(target=server._serve, args=(here, stale), daemon=True)
        serving.start()
        serving.join(10)
        assert not serving.is_alive()


def test_the_ranks_of_the_actor_wait_for_the_replicas_of_all_devices(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each receiver gets its weights from the rank on its device; all ranks gather to the end, also one without."""
    names = ["first", "second", "third"]
    ranks, values, turn = len(names), dict[int, Any](), threading.Barrier(3)
    servers, ends = [], [0, 0, 0]
    for name in names:
        monkeypatch.setattr(ipc_server, "device_name", lambda device, name=name: name)
        servers.append(ipc_server.IpcServer("cpu", 1))
    handle = WeightsHandle(1, "ipc", ADDRESSES.join(server.offer() for server in servers), members=2)
    tensors = some_tensors()

    def run(rank: int) -> None:
        def exchange(value: Mapping[str, Any]) -> Any:
            values[rank] = value
            turn.wait(30)
            found = [values[index] for index in range(ranks)]
            turn.wait(30)
            return found

        def gathered() -> Any:
            yield from tensors.items()
            ends[rank] += 1

        servers[rank].send(2, gathered(), exchange)

    with ThreadPoolExecutor(3) as threads:
        sending = [threads.submit(run, rank) for rank in range(ranks)]
        monkeypatch.setattr(weight_ipc, "device_name", str)
        tasks = []
        for name in ("second", "first"):
            monkeypatch.setattr(weight_ipc, "device_name", lambda device, name=name: name)
            time.sleep(0.1)  # so that the second one comes later
            tasks.append(replicas.load(handle))
            until = time.monotonic() + 10
            while not servers[names.index(name)]._waiting and not tasks[-1].done() and time.monotonic() < until:
                time.sleep(0.01)
        assert all(equal(task.result(30), tensors) for task in tasks)
        for task in sending:
            task.result(30)
    assert ends == [1, 1, 1]
    for server in servers:
        server.close()


def test_a_device_without_a_rank_is_named(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = WeightsHandle(3, "ipc", server.offer(), members=1)
    monkeypatch.setattr(weight_ipc, "device_name", lambda device: "GPU-7")
    with pytest.raises(WorkerError) as caught:
        next(weights_of(handle))
    assert str(caught.value) == (
        "version 3 of the weights: no rank of the actor is on device GPU-7; rollout.weight_sync=ipc needs one on each "
        "device of the rollout; choose shm, tcp or disk"
    )
    assert handle.place.startswith(weight_ipc.this_machine() + AT)
    assert "/" not in handle.place


def test_an_actor_that_has_ended_is_named() -> None:
    with closing(ipc_server.IpcServer("cpu", 1)) as server:
        handle = WeightsHandle(1, "ipc", server.offer(), members=1)
    with pytest.raises(WorkerError, match=r"has ended; rollout\.weight_sync=ipc needs actor and replicas on one mach"):
        next(weights_over_ipc(handle))


def test_a_cuda_bucket_travels_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that torch's storage needs arrives, on the receiver's number of the device."""
    fields = (3, b"\x00handle", 2**20, 512, b"counter", 7, b"event", True)

    class Storage:
        def _share_cuda_(self) -> Any:
            return fields

    class Bucket:
        def untyped_storage(self) -> Any:
            return Storage()

    opened: list[Any] = []

    class Opened:
        @staticmethod
        def _new_shared_cuda(*arguments: Any) -> Any:
            opened.append(arguments)
            return torch.arange(4, dtype=torch.uint8).untyped_storage()

    bucket: Any = Bucket()
    carried = json.loads(json.dumps(weight_ipc.shared_on_device(bucket)))
    monkeypatch.setattr(torch, "UntypedStorage", Opened)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, dtype, device: empty(*shape, dtype=dtype))
    found = weight_ipc._on_device(carried, "cuda:1")
    assert opened == [(1, *fields[1:])]
    assert found.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("settings", ["", "max_split_size_mb:64,expandable_segments:True", "expandable_segments:False"])
def test_a_bucket_is_not_in_expandable_segments_and_all_else_is_as_it_was(settings: str) -> None:
    """Another process cannot map those where a container forbids pidfd_getfd."""
    before = torch._C._accelerator_getAllocatorSettings()
    torch._C._accelerator_setAllocatorSettings(settings)
    try:
        with ipc_server.mappable():
            inside = torch._C._accelerator_getAllocatorSettings()
        assert inside == settings.replace("True", "False")
        assert torch._C._accelerator_getAllocatorSettings() == settings
    finally:
        torch._C._accelerator_setAllocatorSettings(before)


def test_the_weights_are_gathered_to_the_end_without_receivers() -> None:
    ended: list[bool] = []
    with closing(ipc_server.IpcServer("cpu", 1, deadline_s=0.4)) as server:
        server.offer()
        server.send(1, _noting(ended))
    assert ended == [True], "other ranks may have some"


def _noting(ended: list[bool]) -> Iterator[tuple[str, Any]]:
    yield from some_tensors().items()
    ended.append(True)
