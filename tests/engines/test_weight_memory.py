"""Weights in memory that processes of one machine share."""

import gc
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from rlcore.contracts.weight_memory import ADDRESSES, mapped_weights
from rlcore.contracts.weights import check_readable, weights_of
from rlcore.errors import WorkerError
from rlcore.types import WeightsHandle

torch = pytest.importorskip("torch")
memory_server = pytest.importorskip("rlcore.engines.memory_server")
weight_server = pytest.importorskip("rlcore.engines.weight_server")


def some_tensors() -> dict[str, Any]:
    """Of several types and sizes: smaller and larger than the first step of 1 MiB, not in one piece, without data."""
    return {
        "matrix": torch.randn(30, 7),
        "byte": torch.arange(3).byte(),  # the next one is not aligned
        "long": torch.arange(7),
        "number": torch.tensor(2.5),
        "none": torch.empty(0, 4),
        "large": torch.randn(900, 1000).bfloat16(),
        "turned": torch.randn(600, 400).T,
        "parameter": torch.nn.Parameter(torch.randn(300)),
        "filling": torch.randn(2**18),
        "last": torch.empty(0),
    }


def equal(found: Mapping[str, Any], tensors: Mapping[str, Any]) -> bool:
    """The same names in the same order, types and numbers."""
    return list(found) == list(tensors) and all(
        found[name].dtype == tensor.dtype and found[name].shape == tensor.shape and torch.equal(found[name], tensor)
        for name, tensor in tensors.items()
    )


def shared_files() -> int:
    """Blocks of shared memory that this process has open or mapped."""
    return len(open_files("rlcore-weights")) + Path("/proc/self/maps").read_text().count("rlcore-weights")


def open_files(part: str = "") -> list[os.stat_result]:
    """The files of this process's descriptors whose names contain `part`; a thread may close its own meanwhile."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            if part in os.readlink(link := f"/proc/self/fd/{name}"):
                found.append(os.stat(link))
    return found


@pytest.fixture
def server() -> Iterator[Any]:
    before = set(os.listdir("/dev/shm"))
    with closing(memory_server.memory_server()) as opened:
        yield opened
    assert not [thread for thread in threading.enumerate() if thread.name == "weights"]
    gc.collect()  # the traceback of an expected error
    assert shared_files() == 0, "the memory is gone with its receivers"
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "rlcore" in name]


def test_receivers_get_every_tensor_as_it_was_offered_at_any_time(server: Any) -> None:
    tensors = some_tensors()
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    handle = WeightsHandle(3, "shm", server.offer(tensors.items()))
    check_readable(handle)
    for tensor in tensors.values():
        tensor.detach().zero_()  # as an update does
    with ThreadPoolExecutor() as threads:
        found = [threads.submit(lambda: dict(weights_of(handle))) for _ in range(3)]
        assert all(equal(task.result(), before) for task in found)
    assert equal(dict(mapped_weights(server.offer(tensors.items()))), tensors)
    assert dict(mapped_weights(server.offer([]))) == {}


def files_in_memory() -> dict[int, int]:
    """The size of each file in memory with weights that this process has open, by inode."""
    return {stat.st_ino: stat.st_size for stat in open_files("rlcore-weights")}


def test_a_version_takes_the_memory_of_the_one_before_unless_a_receiver_still_reads_that(server: Any) -> None:
    first = some_tensors()
    reader = mapped_weights(server.offer(first.items()))
    begun = [next(reader)]
    was = files_in_memory()
    second = server.offer(some_tensors().items())
    assert files_in_memory().keys() - was.keys(), "it went into new memory"
    assert equal(dict([*begun, *reader]), first), "what it reads is not overwritten"
    was = files_in_memory()
    assert len(dict(mapped_weights(second))) == len(first)
    for _ in range(3):
        tensors = some_tensors()
        address = server.offer(tensors.items())
        assert equal(dict(mapped_weights(address)), tensors)
    assert files_in_memory().items() <= was.items(), "tensors have the same places in each version"


def test_shares_of_several_ranks_are_one_version_also_when_all_offer_the_next_one(server: Any) -> None:
    """The receiver has the memory of every rank before it reads the first tensor."""
    tensors = some_tensors()
    first, second = ({name: tensors[name] for name in list(tensors)[part::2]} for part in (0, 1))
    with closing(memory_server.memory_server()) as other:
        address = ADDRESSES.join([server.offer(first.items()), other.offer(second.items())])
        place = WeightsHandle(1, "shm", address).place
        assert [secret for secret in re.findall("/([0-9a-f]{32})", address) if secret in place] == []
        assert place.count("rlcore-weights-") == 2
        reader = mapped_weights(address)
        begun = [next(reader)]
        for rank in (server, other):
            rank.offer([("other", torch.ones(3))])
        assert equal(dict([*begun, *reader]), first | second)
        with pytest.raises(WorkerError, match="no memory came"):
            next(mapped_weights(address))


def test_tensors_that_are_kept_are_copies_and_borrowed_ones_are_not(server: Any) -> None:
    handle = WeightsHandle(1, "shm", server.offer([("one", torch.ones(9))]))
    kept, borrowed = dict(weights_of(handle)), dict(weights_of(handle, borrowed=True))
    borrowed["one"].add_(0.0)  # private to the receiver, like all that it writes
    fresh = dict(weights_of(handle, borrowed=True))
    server.offer([("one", torch.full((9,), 2.0))])
    assert kept["one"].tolist() == [1.0] * 9
    assert borrowed["one"].tolist() == [1.0] * 9
    assert fresh["one"].tolist() == [2.0] * 9


def test_a_tensor_that_changes_its_size_gets_another_place(server: Any) -> None:
    server.offer([("one", torch.ones(9)), ("two", torch.ones(3))])
    tensors = {"one": torch.randn(20), "two": torch.randn(3).double()}
    assert equal(dict(mapped_weights(server.offer(tensors.items()))), tensors)


def test_an_address_is_good_for_one_version_and_for_those_who_know_the_secret(server: Any) -> None:
    first = server.offer(some_tensors().items())
    name, _, secret = first.rpartition("/")
    refused = f"weights: receiving them through shared memory from '{name}': EOFError: no memory came"
    with pytest.raises(WorkerError, match=refused):
        next(mapped_weights(f"{name}/{'0' * len(secret)}"))
    second = server.offer(some_tensors().items())
    with pytest.raises(WorkerError, match=refused) as caught:
        next(mapped_weights(first))
    assert secret not in str(caught.value)
    assert len(dict(mapped_weights(second))) == len(some_tensors())


STRANGER = """
import os, socket, sys
os.setuid(int(sys.argv[3]))
connection = socket.socket(socket.AF_UNIX)
connection.settimeout(20)
connection.connect(chr(0) + sys.argv[1])
connection.sendall(sys.argv[2].encode())
first, files, _, _ = socket.recv_fds(connection, 1, 1)
print(first, len(files))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
@pytest.mark.parametrize(("user", "output"), [(0, "b'1' 1"), (65534, "b'' 0")])
def test_a_process_of_another_user_gets_nothing_with_the_secret(server: Any, user: int, output: str) -> None:
    name, _, secret = server.offer(some_tensors().items()).rpartition("/")
    command = [sys.executable, "-c", STRANGER, name, secret, str(user)]
    done = subprocess.run(command, text=True, capture_output=True, timeout=30, check=False)
    assert done.stdout.strip() == output, done.stderr


HALFWAY = """
import os, signal, sys
from rlcore.contracts.weight_memory import mapped_weights
weights = mapped_weights(sys.argv[1])
next(weights)
print("halfway", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_one_that_dies_in_the_middle_delays_no_other_and_comes_back_to_the_right_version(server: Any) -> None:
    tensors = some_tensors()
    address = server.offer(tensors.items())
    others = mapped_weights(address)
    next(others)
    dead = subprocess.Popen([sys.executable, "-c", HALFWAY, address], stdout=subprocess.PIPE, text=True)
    assert dead.communicate(timeout=60)[0] == "halfway\n"
    assert equal(dict([("matrix", tensors["matrix"]), *others]), tensors)
    assert equal(dict(mapped_weights(address)), tensors), "its successor"


@pytest.mark.slow
def test_a_silent_client_is_disconnected_and_one_that_reads_slowly_is_not(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_server, "EXCHANGE_S", 0.3)
    address = server.offer((tensors := some_tensors()).items())
    slow = mapped_weights(address)
    begun = [next(slow)]
    silent = socket.socket(socket.AF_UNIX)
    silent.settimeout(5)
    silent.connect("\0" + address.rpartition("/")[0])
    assert silent.recv(1) == b"", "it was let go"
    silent.close()
    was = files_in_memory()
    server.offer(some_tensors().items())
    assert files_in_memory().keys() - was.keys(), "it went into new memory"
    assert equal(dict([*begun, *slow]), tensors)


def test_memory_that_cannot_be_had_is_one_line_with_size_and_key(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    address = server.offer([("one", torch.ones(3))])
    monkeypatch.setattr(memory_server.os, "posix_fallocate", full)
    with pytest.raises(WorkerError) as caught:
        server.offer([("one", torch.ones(3)), ("large", torch.ones(2**20))])
    assert str(caught.value) == (
        "weights: 4 MiB of shared memory cannot be had for large: No space left on device; give the actor's container "
        "more memory, or choose rollout.weight_sync=disk"
    )
    with pytest.raises(WorkerError, match="no memory came"):
        next(mapped_weights(address))
    monkeypatch.undo()
    assert equal(dict(mapped_weights(server.offer((tensors := some_tensors()).items()))), tensors)


def test_only_tensors_take_memory_and_few_descriptors_whatever_their_number(server: Any) -> None:
    tensors = {f"layer {number}": torch.full((75_001,), float(number)) for number in range(150)}
    was, num_before = files_in_memory(), len(open_files())
    address = server.offer(tensors.items())
    [file] = files_in_memory().keys() - was.keys()
    [used] = {stat.st_blocks * 512 for stat in open_files("rlcore-weights") if stat.st_ino == file}
    whole = sum(tensor.nbytes for tensor in tensors.values())
    assert whole <= used < 1.02 * whole, "what it grew by, and no tensor has, takes none"
    assert len(open_files()) - num_before < 10, "steps that double, not one for each megabyte"
    assert equal(dict(mapped_weights(address)), tensors)


def test_a_receiver_that_stopped_reading_delays_no_hand_over(server: Any) -> None:
    many = {f"{'long name ' * 9}{number}": torch.ones(1) for number in range(9000)}
    name, _, secret = server.offer(many.items()).rpartition("/")
    with closing(socket.socket(socket.AF_UNIX)) as stalled, ThreadPoolExecutor() as threads:
        stalled.settimeout(20)
        stalled.connect(f"\0{name}")
        stalled.sendall(secret.encode())
        _, (descriptor,), _, _ = socket.recv_fds(stalled, 1, 1)  # the list of tensors remains unread, and does not fit
        os.close(descriptor)
        was = files_in_memory()
        address = threads.submit(server.offer, many.items()).result(weight_server.EXCHANGE_S / 3)
        assert files_in_memory().keys() - was.keys(), "it went into new memory"
        assert equal(dict(mapped_weights(address)), many)


def test_memory_of_a_receiver_that_was_killed_with_something_unread_is_used_again() -> None:
    copies = memory_server.SharedCopies()
    version = copies.copied([("one", torch.ones(9))])
    ours, theirs = socket.socketpair()
    with closing(copies), closing(ours):
        version.memory.receivers.add(ours)
        ours.sendall(b"fields")
        assert copies.copied([("one", torch.ones(9))]).memory is not version.memory
        version = copies.copied([("one", torch.ones(9))])
        version.memory.receivers.add(ours)
        theirs.close()
        assert copies.copied([("one", torch.ones(9))]).memory is version.memory


def test_a_sender_that_is_gone_is_an_error_that_names_it() -> None:
    server = memory_server.memory_server()
    address = server.offer((tensors := some_tensors()).items())
    weights = mapped_weights(address)
    begun = [next(weights)]
    server.close()
    assert equal(dict([*begun, *weights]), tensors), "one that has the memory reads to the end"
    with pytest.raises(WorkerError, match=r"listens on another machine or has ended; rollout\.weight_sync=shm needs"):
        next(mapped_weights(address))
