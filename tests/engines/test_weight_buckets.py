"""Weights that go in buckets through memory that processes of one machine share."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rlcore.contracts import weight_buckets
from rlcore.contracts.weight_buckets import received_in_buckets
from rlcore.contracts.weights import check_readable, weights_of
from rlcore.errors import WorkerError
from rlcore.types import WeightsHandle

torch = pytest.importorskip("torch")
bucket_server = pytest.importorskip("rlcore.engines.bucket_server")
weight_server = pytest.importorskip("rlcore.engines.weight_server")


def some_tensors() -> dict[str, Any]:
    """Of several types and sizes: smaller and larger than a bucket of 1 MiB, and without data."""
    return {
        "matrix": torch.randn(30, 7),
        "byte": torch.arange(3).byte(),  # the next one is not aligned
        "long": torch.arange(7),
        "number": torch.tensor(2.5),
        "none": torch.empty(0, 4),
        "large": torch.randn(900, 1000).bfloat16(),
        "turned": torch.randn(600, 400).T.contiguous(),
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
    opened = sum("rlcore-weights" in os.readlink(f"/proc/self/fd/{name}") for name in safe_descriptors())
    return opened + Path("/proc/self/maps").read_text().count("rlcore-weights")


def safe_descriptors() -> list[str]:
    return [name for name in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{name}")]


@pytest.fixture
def server() -> Iterator[Any]:
    before = set(os.listdir("/dev/shm"))
    with closing(bucket_server.bucket_server(1)) as opened:
        yield opened
    assert not [thread for thread in threading.enumerate() if thread.name == "weights"]
    assert shared_files() == 0, "the memory is gone with its receivers"
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "rlcore" in name]


@pytest.mark.parametrize("size", [1, 7, 64, 2**20])
def test_buckets_hold_every_byte_once_and_in_order(size: int) -> None:
    tensors = {name: tensor[:13] if tensor.ndim else tensor for name, tensor in some_tensors().items()}
    tensors["large"] = tensors["large"][:, :9]
    buckets = list(bucket_server.buckets_of(tensors, size))
    for pieces in buckets:
        offsets = [0, *(piece.offset + piece.num_bytes for piece in pieces)]
        assert [piece.offset for piece in pieces] == offsets[:-1]
        assert offsets[-1] <= size
    assert all(sum(piece.num_bytes for piece in pieces) == size for pieces in buckets[:-1])
    for name, tensor in tensors.items():
        mine = [piece for pieces in buckets for piece in pieces if piece.name == name]
        ends = [0, *(piece.begin + piece.num_bytes for piece in mine)]
        assert [piece.begin for piece in mine] == ends[:-1]
        assert ends[-1] == tensor.nbytes
    assert list(bucket_server.buckets_of({}, size)) == []


def test_receivers_get_every_tensor_as_it_was_offered_at_any_time(server: Any) -> None:
    tensors = some_tensors()
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    handle = WeightsHandle(3, "shm", server.offer(weight_server.host_copies(tensors)))
    check_readable(handle)
    for tensor in tensors.values():
        tensor.zero_()  # as an update does
    with ThreadPoolExecutor() as threads:
        found = [threads.submit(lambda: dict(weights_of(handle))) for _ in range(3)]
        assert all(equal(task.result(), before) for task in found)
    assert equal(dict(received_in_buckets(server.offer(tensors))), tensors)
    assert dict(received_in_buckets(server.offer({}))) == {}


def test_an_address_is_good_for_one_version_and_for_those_who_know_the_secret(server: Any) -> None:
    first = server.offer(some_tensors())
    name, _, secret = first.rpartition("/")
    refused = f"weights: receiving them through shared memory from '{name}': EOFError: no memory came"
    with pytest.raises(WorkerError, match=refused):
        next(received_in_buckets(f"{name}/{'0' * len(secret)}"))
    second = server.offer(some_tensors())
    with pytest.raises(WorkerError, match=refused) as caught:
        next(received_in_buckets(first))
    assert secret not in str(caught.value)
    assert len(dict(received_in_buckets(second))) == len(some_tensors())


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
    name, _, secret = server.offer(some_tensors()).rpartition("/")
    command = [sys.executable, "-c", STRANGER, name, secret, str(user)]
    done = subprocess.run(command, text=True, capture_output=True, timeout=30, check=False)
    assert done.stdout.strip() == output, done.stderr


HALFWAY = """
import os, signal, sys
from rlcore.contracts.weight_buckets import received_in_buckets
weights = received_in_buckets(sys.argv[1])
next(weights)
print("halfway", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_one_that_dies_in_the_middle_delays_no_other_and_comes_back_to_the_right_version(server: Any) -> None:
    tensors = some_tensors()
    address = server.offer(tensors)
    others = received_in_buckets(address)
    next(others)
    dead = subprocess.Popen([sys.executable, "-c", HALFWAY, address], stdout=subprocess.PIPE, text=True)
    assert dead.communicate(timeout=60)[0] == "halfway\n"
    assert equal(dict([("matrix", tensors["matrix"]), *others]), tensors)
    assert equal(dict(received_in_buckets(address)), tensors), "its successor"


@pytest.mark.slow
def test_a_client_that_stops_halfway_or_is_silent_is_disconnected(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_server, "EXCHANGE_S", 0.3)
    address = server.offer(tensors := some_tensors())
    slow = received_in_buckets(address)
    assert next(slow)[0] == "matrix"
    silent = socket.socket(socket.AF_UNIX)
    silent.settimeout(5)
    silent.connect("\0" + address.rpartition("/")[0])
    assert equal(dict(received_in_buckets(address)), tensors)
    assert silent.recv(1) == b"", "it was let go"
    silent.close()
    time.sleep(0.5)
    with pytest.raises(WorkerError, match="weights: receiving them through shared memory from "):
        list(slow)


def test_a_bucket_that_was_never_filled_is_not_confirmed_for_another(server: Any) -> None:
    address = server.offer(some_tensors())
    name, _, secret = address.rpartition("/")
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(5)
        connection.connect("\0" + name)
        connection.sendall(secret.encode())
        first, files, _, _ = socket.recv_fds(connection, 1, 1)
        os.close(files[0])
        assert first == weight_buckets.READY
        connection.sendall((7).to_bytes(8))
        while connection.recv(1 << 16):  # ends: the sender sends no more
            pass


def test_memory_that_cannot_be_had_is_one_line_with_size_and_key(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bucket_server.os, "posix_fallocate", full)
    address = server.offer(some_tensors())
    with pytest.raises(WorkerError) as caught:
        next(received_in_buckets(address))
    assert str(caught.value).endswith(
        "2 MiB of shared memory cannot be had for a replica: No space left on device; lower "
        "rollout.weights_bucket_mib=1, give the actor's container more memory, or choose rollout.weight_sync=tcp or "
        "disk"
    )
    monkeypatch.undo()
    assert equal(dict(received_in_buckets(server.offer(tensors := some_tensors()))), tensors)


def test_a_sender_that_is_gone_is_an_error_that_names_it() -> None:
    server = bucket_server.bucket_server(1)
    address = server.offer(some_tensors())
    weights = received_in_buckets(address)
    next(weights)
    server.close()
    with pytest.raises(WorkerError, match="weights: receiving them through shared memory from 'rlcore-weights-"):
        list(weights)
    with pytest.raises(WorkerError, match=r"listens on another machine or has ended; rollout\.weight_sync=shm needs"):
        next(received_in_buckets(address))
