"""Messages whose large arrays travel in shared memory: equal, read-only, copied once, gone with the last reader."""

import gc
import logging
import mmap
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlcore.cluster import shared_arrays
from rlcore.cluster.shared_arrays import MIN_SHARED_BYTES, NUMBER, ArrayLink, Message, say_pipe
from rlcore.errors import WorkerError
from rlcore.testing.tiny import random_batch

NUM = MIN_SHARED_BYTES // 4 + 1
"""Float32 numbers that are more than a message keeps."""
STRUCTURED = np.zeros(NUM, dtype=[("a", "f4"), ("b", "i2")])
VALUES: dict[str, Any] = {
    "nothing": None,
    "no numbers": np.zeros((0, 7), np.float32),
    "no numbers next to many": [np.zeros(0), np.arange(NUM, dtype=np.float32), np.zeros((3, 0))],
    "few": np.arange(7),
    "many": np.arange(NUM, dtype=np.float32),
    "many, several": [np.arange(NUM, dtype=np.float32), np.arange(3, dtype=np.int8), np.arange(5, dtype=np.float64)],
    "bools": np.arange(MIN_SHARED_BYTES) % 3 == 0,
    "a number": np.float32(3.5),
    "of no dimension": np.array(7),
    "by columns": np.asfortranarray(np.arange(2.0 * NUM).reshape(2, NUM)),
    "not contiguous": np.arange(2 * NUM, dtype=np.float32)[::2],
    "broadcast": np.broadcast_to(np.float32(2), (3, NUM)),
    "of objects": np.array([{"a": 1}, "b", None] * 100_000, dtype=object),
    "of records": STRUCTURED,
    "of strings": np.array(["abc", "d"] * NUM),
    "a huge string": "é" * (3 * MIN_SHARED_BYTES),
    "huge bytes": bytes(3 * MIN_SHARED_BYTES),
}


@pytest.fixture
def link() -> Iterator[tuple[ArrayLink, ArrayLink]]:
    """Both ends."""
    ours, end = ArrayLink.pair()
    theirs = ArrayLink(end)
    yield ours, theirs
    ours.close()
    theirs.close()


def shared(value: Any) -> Message:
    """A message as a cluster makes it."""
    message = Message(value)
    if message.is_large:
        message.share()
    return message


def arrays_of(value: Any) -> list[Any]:
    """Arrays in a value."""
    return [part for part in (value if isinstance(value, list) else [value]) if isinstance(part, np.ndarray)]


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_what_arrives_is_equal_and_contiguous_arrays_are_read_only(
    link: tuple[ArrayLink, ArrayLink], value: Any
) -> None:
    ours, theirs = link
    found = theirs.loads(ours.sent(shared(value)))
    for left, right in zip(arrays_of(value), arrays_of(found), strict=True):
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        assert (left == right).all()
        if left.dtype != object and (left.flags.c_contiguous or left.flags.f_contiguous):
            assert not right.flags.writeable
            assert right.flags.aligned
    if not arrays_of(value):
        assert found == value


def test_large_arrays_are_not_in_the_pipe_and_small_ones_are(link: tuple[ArrayLink, ArrayLink]) -> None:
    ours, _ = link
    assert len(ours.sent(shared(np.zeros(NUM, np.float32)))) < 1000
    assert len(ours.sent(shared(np.zeros(1000, np.float32)))) > 4000


@pytest.mark.slow
def test_one_copy_serves_every_reader() -> None:
    pairs = [ArrayLink.pair() for _ in range(3)]
    message = shared(random_batch(num_groups=400, samples=16, seed=5))
    assert message.memory is not None
    inode = os.fstat(message.memory.fd).st_ino
    kept = []
    for ours, end in pairs:
        theirs = ArrayLink(end)
        kept.append(theirs.loads(ours.sent(message)))
        ours.close()
        theirs.close()
    mapped = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if shared_arrays.NAME in line]
    assert {int(fields[4]) for fields in mapped} == {inode}
    assert len(mapped) >= 1
    for batch in kept:
        assert (batch.tokens.token_ids_BT == kept[0].tokens.token_ids_BT).all()


def test_the_memory_cannot_change_or_shrink_under_a_reader() -> None:
    message = shared(np.zeros(NUM, np.float32))
    assert message.memory is not None
    for change in (
        lambda fd: os.pwrite(fd, b"1", 0),
        lambda fd: os.ftruncate(fd, 10),
        lambda fd: mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_WRITE),
    ):
        with pytest.raises(PermissionError):
            change(message.memory.fd)


@pytest.mark.slow
def test_nothing_is_left_when_the_last_reader_is_gone(link: tuple[ArrayLink, ArrayLink]) -> None:
    ours, theirs = link
    before, names = len(os.listdir("/proc/self/fd")), os.listdir("/dev/shm")
    message: Message | None = shared(np.zeros(NUM, np.float32))
    assert message is not None
    found = theirs.loads(ours.sent(message))
    part = found[:3]
    assert os.listdir("/dev/shm") == names
    message = found = None
    gc.collect()
    assert shared_arrays.NAME in Path("/proc/self/maps").read_text()
    assert part.tolist() == [0.0] * 3
    part = None
    gc.collect()
    assert shared_arrays.NAME not in Path("/proc/self/maps").read_text()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.slow
def test_a_message_that_is_not_read_does_not_disturb_the_next_one(link: tuple[ArrayLink, ArrayLink]) -> None:
    ours, theirs = link
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        ours.sent(shared(np.zeros(NUM, np.float32)))
    found = theirs.loads(ours.sent(shared(np.ones(NUM, np.float32))))
    assert found.all()
    del found
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_memory_that_does_not_come_is_an_error_that_says_what_helps(link: tuple[ArrayLink, ArrayLink]) -> None:
    ours, theirs = link
    frame = ours.sent(shared(np.zeros(NUM, np.float32)))
    socket.recv_fds(theirs._socket, NUMBER.size, 0)  # without the descriptor, as of a process that may open no more
    ours._socket.send(NUMBER.pack(1))
    with pytest.raises(WorkerError, match="did not come; raise the limit of open files"):
        theirs.loads(frame)


def test_without_shared_memory_arrays_go_through_the_pipe_and_the_log_says_so_once(
    link: tuple[ArrayLink, ArrayLink], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(fd: int, data: object, offset: int) -> int:
        raise OSError(28, "No space left on device")

    say_pipe.cache_clear()
    monkeypatch.setattr(os, "pwrite", full)
    ours, theirs = link
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            found = theirs.loads(ours.sent(shared(np.full(NUM, number, np.float32))))
            assert (found == number).all()
            assert not found.flags.writeable
    assert len(caplog.records) == 1
    assert "No space left on device" in caplog.text
    say_pipe.cache_clear()


def test_a_process_that_has_ended_is_sent_nothing(link: tuple[ArrayLink, ArrayLink]) -> None:
    ours, theirs = link
    theirs.close()
    assert ours.sent(shared(np.zeros(NUM, np.float32))) == b""
