"""Weights that are broadcast to all replicas at once, by gloo: groups, losses in the middle, returns."""

import fcntl
import math
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from rlcore.contracts import weight_groups
from rlcore.contracts.weight_groups import GroupReceiver
from rlcore.contracts.weights import weights_of
from rlcore.errors import WorkerError
from rlcore.types import WeightsHandle

torch = pytest.importorskip("torch")
group_server = pytest.importorskip("rlcore.engines.group_server")

HOST = "127.0.0.1"
Tensors = Mapping[str, Any]


def some_tensors(version: int) -> dict[str, Any]:
    """Of several types and sizes, also larger than a bucket of 1 MiB, and without data."""
    return {
        "matrix": torch.full((30, 7), float(version)),
        "byte": torch.arange(3).byte(),  # the next one is not aligned
        "none": torch.empty(0, 4),
        "large": torch.full((900, 1000), version).bfloat16(),
        "filling": torch.arange(2**18) + version,
        "number": torch.tensor(2.5 * version),
    }


def equal(found: Tensors, tensors: Tensors) -> bool:
    """The same names in the same order, types and numbers."""
    return list(found) == list(tensors) and all(
        found[name].dtype == tensor.dtype and found[name].shape == tensor.shape and torch.equal(found[name], tensor)
        for name, tensor in tensors.items()
    )


@pytest.fixture
def server(opened_once: None) -> Iterator[Any]:
    with closing(group_server.group_server(HOST, 1, "gloo", "cpu")) as opened:
        yield opened
    assert not [thread for thread in threading.enumerate() if thread.name == "weights"]


class Replica:
    """A process of a replica, played by a thread."""

    def __init__(self) -> None:
        self.receiver = GroupReceiver()
        self._thread = ThreadPoolExecutor(1)

    def take(self, handle: WeightsHandle) -> "Future[dict[str, Any]]":
        return self._thread.submit(lambda: dict(self.receiver.weights(handle)))

    @property
    def group(self) -> str:
        return self.receiver._group.name if self.receiver._group else ""


def handed_over(server: Any, version: int, replicas: list[Replica]) -> list[bool]:
    """True for each replica that has got exactly these tensors."""
    tensors = some_tensors(version)
    handle = WeightsHandle(version, "nccl", server.offer(tensors.items()), members=len(replicas))
    found = [replica.take(handle) for replica in replicas]
    return [equal(task.result(30), tensors) for task in found]


@pytest.mark.slow
def test_a_group_lives_as_long_as_its_members_and_a_new_member_makes_a_new_one(server: Any) -> None:
    first, second = Replica(), Replica()
    assert handed_over(server, 1, [first, second]) == [True, True]
    group = first.group
    assert group == second.group != ""
    assert handed_over(server, 2, [second, first]) == [True, True]
    assert first.group == second.group == group, "nothing changed, so they need not meet again"
    second.receiver.close()
    second = Replica()
    assert handed_over(server, 3, [first, second]) == [True, True]
    assert first.group == second.group not in ("", group)
    assert handed_over(server, 4, [first]) == [True]
    for replica in (first, second):
        replica.receiver.close()


def test_one_that_comes_back_takes_its_version_from_the_copy_alone(server: Any) -> None:
    tensors = some_tensors(5)
    handle = WeightsHandle(5, "nccl", server.offer(tensors.items()))
    assert equal(Replica().take(handle).result(30), tensors)
    assert equal(dict(weights_of(handle)), tensors)
    old = handle
    server.offer(some_tensors(6).items())
    with pytest.raises(WorkerError, match=f"weights: receiving them from {HOST}:"):
        dict(weights_of(old))
    with pytest.raises(WorkerError, match=f"weights: receiving them from {HOST}:"):
        Replica().take(replace(old, members=1)).result(30)


def stopped_after(server: Any, num: int, then: Any) -> list[bool]:
    """Hand a version over to three, of which one has `num` tensors and then does `then`: what the others have got."""
    replicas = [Replica() for _ in range(3)]
    tensors = some_tensors(7)
    handle = WeightsHandle(7, "nccl", server.offer(tensors.items()), members=3)
    found = [replica.take(handle) for replica in replicas[1:]]
    weights = replicas[0].receiver.weights(handle)
    for _ in range(num):
        next(weights)
    then(weights)
    others = [equal(task.result(30), tensors) for task in found]
    assert [replica.group for replica in replicas[1:]] == ["", ""], "the group is abandoned"
    assert handed_over(server, 8, replicas[1:]) == [True, True]
    for replica in replicas[1:]:
        replica.receiver.close()
    weights.close()
    return others


@pytest.mark.slow
@pytest.mark.parametrize("num", [1, 4])
def test_one_that_leaves_in_the_middle_takes_no_other_with_it(server: Any, num: int) -> None:
    assert stopped_after(server, num, lambda weights: weights.close()) == [True, True]


@pytest.mark.slow
def test_one_that_stops_in_the_middle_is_waited_for_no_longer_than_the_deadline(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_groups, "EXCHANGE_S", 2.0)
    assert stopped_after(server, 1, lambda weights: None) == [True, True]


class Endless:
    """A process group whose broadcasts never end, as NCCL's do when a member has gone; gloo's end with an error."""

    def __init__(self, group: Any = None) -> None:
        self._inner = group

    def broadcast(self, tensors: Any, options: Any) -> "Endless":
        return self

    def is_completed(self) -> bool:
        return False

    def abort(self) -> None:
        self._inner.abort()


def endless() -> Any:
    group = object.__new__(weight_groups.BroadcastGroup)
    group._group, group._limit_s = Endless(), math.inf
    return group


def test_a_broadcast_that_never_ends_is_left_when_a_connection_ends_or_at_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here, there = socket.socketpair()
    with here:
        there.close()
        with pytest.raises(EOFError, match="the other end of its connection is gone"):
            endless().broadcast(torch.empty(4), lambda: weight_groups.watch([here]))
    monkeypatch.setattr(weight_groups, "EXCHANGE_S", 0.05)
    with pytest.raises(TimeoutError, match=r"a bucket was not broadcast within 0\.05 s"):
        endless().broadcast(torch.empty(4), lambda: None)


@pytest.mark.slow
def test_both_sides_leave_a_broadcast_that_never_ends_when_a_member_is_gone(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All then read the copy: a member that has gone takes no other with it, whatever the transport does."""
    really, gone = weight_groups.BroadcastGroup.broadcast, set[int]()

    def never_ends(group: Any, bytes_N: Any, look: Any) -> None:
        if threading.get_ident() in gone:
            raise OSError("killed")
        group._group = Endless(group._group)
        really(group, bytes_N, look)

    monkeypatch.setattr(weight_groups.BroadcastGroup, "broadcast", never_ends)
    tensors, replicas = some_tensors(4), [Replica() for _ in range(3)]
    handle = WeightsHandle(4, "nccl", server.offer(tensors.items()), members=3)
    replicas[0]._thread.submit(lambda: gone.add(threading.get_ident())).result()
    tasks = [replica.take(handle) for replica in replicas]
    assert all(equal(task.result(weight_groups.EXCHANGE_S / 2), tensors) for task in tasks)


def test_nccl_itself_does_not_end_a_process_whose_group_can_be_left(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Fake:
        """The class that only builds for CUDA have."""

        class Options:
            _timeout: Any = None

        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            made.append((options._timeout.total_seconds(), os.environ["TORCH_NCCL_BLOCKING_WAIT"]))

    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Fake, raising=False)
    for before in (None, "0"):
        monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
        if before is not None:
            monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", before)
        weight_groups.BroadcastGroup("group", "nccl", torch.distributed.HashStore(), HOST, 0, 1)
        assert os.environ.get("TORCH_NCCL_BLOCKING_WAIT") == before
    assert [waits for _, waits in made] == ["1", "1"], "no watchdog ends the process at an error"
    assert made[0][0] > 10 * weight_groups.EXCHANGE_S


def test_a_broadcast_that_cannot_be_left_keeps_no_later_version_waiting(
    server: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(group_server, "TURN_S", 0.2)
    sending = server._send.__self__._sending
    sending.acquire()
    try:
        replicas = [Replica(), Replica()]
        assert all(handed_over(server, 5, replicas))
        monkeypatch.setattr(group_server, "TURN_S", 60.0)
        assert all(handed_over(server, 6, replicas)), "at once, from the copy"
    finally:
        sending.release()
    assert [replica.group for replica in replicas] == ["", ""]
    assert sum("an earlier broadcast has not ended" in line for line in caplog.messages) == 2
    assert all(handed_over(server, 7, replicas))
    assert replicas[0].group == replicas[1].group != "", "in a group as soon as it has ended"
    for replica in replicas:
        replica.receiver.close()


def test_receivers_that_came_continue_without_one_that_does_not(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_groups, "MEET_S", 1.0)
    tensors, replicas = some_tensors(3), [Replica(), Replica()]
    handle = WeightsHandle(3, "nccl", server.offer(tensors.items()), members=3)
    gone = weight_groups._connected(handle.path, weight_groups.Wish(3))
    gone.close()  # it came, and died while it waited
    assert all(equal(task.result(30), tensors) for task in [replica.take(handle) for replica in replicas])
    assert replicas[0].group == replicas[1].group != ""
    for replica in replicas:
        replica.receiver.close()


def test_a_group_is_closed_to_those_without_the_secret(server: Any) -> None:
    handle = WeightsHandle(1, "nccl", server.offer(some_tensors(1).items()), members=1)
    place, _, secret = handle.path.rpartition("/")
    with weight_groups._connected(f"{place}/{'0' * len(secret)}", weight_groups.Wish(1)) as stranger:
        stranger.settimeout(10)
        with pytest.raises((EOFError, ConnectionResetError)):
            weight_groups.read_message(stranger)
    replica = Replica()
    assert handed_over(server, 2, [replica]) == [True]
    replica.receiver.close()


CHILD = """
import os, signal, sys
from rlcore.contracts.weight_groups import GroupReceiver
from rlcore.types import WeightsHandle
receiver, dies = GroupReceiver(), sys.argv[1] == "dies"
for line in sys.stdin:
    version, members, path = line.split()
    total, seen = 0.0, 0
    for name, tensor in receiver.weights(WeightsHandle(int(version), "nccl", path, int(members))):
        total, seen = total + float(tensor.double().sum()), seen + 1
        if dies and seen == 4:
            os.kill(os.getpid(), signal.SIGKILL)
    print(version, seen, total, receiver._group is not None, flush=True)
receiver.close()
"""


class Child:
    """A process that receives the announced versions."""

    def __init__(self, kind: str) -> None:
        command = [sys.executable, "-c", CHILD, kind]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def tell(self, handle: WeightsHandle) -> None:
        assert self.process.stdin
        self.process.stdin.write(f"{handle.version} {handle.members} {handle.path}\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        self.process.communicate(timeout=30)


def expected(version: int, *, in_group: bool) -> str:
    tensors = some_tensors(version)
    total = sum(float(tensor.double().sum()) for tensor in tensors.values())
    return f"{version} {len(tensors)} {total} {in_group}"


@pytest.mark.fault
def test_a_replica_that_is_killed_in_the_middle_comes_back_with_the_version_of_the_others(server: Any) -> None:
    """Processes, of which one is killed with a bucket in its hands."""
    children = [Child("stays"), Child("dies"), Child("stays")]

    def offered(version: int, members: int) -> WeightsHandle:
        return WeightsHandle(version, "nccl", server.offer(some_tensors(version).items()), members)

    handle = offered(1, 3)
    for child in children:
        child.tell(handle)
    assert children[1].answer() == "", "it has died"
    assert [children[0].answer(), children[2].answer()] == [expected(1, in_group=False)] * 2
    children[1].end()
    children[1] = Child("stays")
    children[1].tell(replace(handle, members=0))
    assert children[1].answer() == expected(1, in_group=False), "from the copy, while the others may sample"
    for version in (2, 3):
        handle = offered(version, 3)
        for child in children:
            child.tell(handle)
        assert [child.answer() for child in children] == [expected(version, in_group=True)] * 3
    for child in children:
        child.end()


def test_a_connection_is_watched_also_where_very_many_files_are_open() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], min(limits[1], 2000)), limits[1]))
    try:
        ours, theirs = socket.socketpair()
        with ours:
            number = fcntl.fcntl(ours, fcntl.F_DUPFD, 1500)
        with theirs, socket.socket(fileno=number) as high:
            assert high.fileno() >= 1500
            weight_groups.watch([high], 0.0)
            theirs.close()
            with pytest.raises(EOFError):
                weight_groups.watch([high], 0.0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
