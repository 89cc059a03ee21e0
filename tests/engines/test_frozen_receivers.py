"""A receiver of a broadcast that hangs costs the others a part of their deadline, not all of it."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import pytest

from rlcore.contracts import weight_groups
from rlcore.contracts.weight_groups import GroupReceiver, Wish
from rlcore.types import WeightsHandle

torch = pytest.importorskip("torch")
group_server = pytest.importorskip("rlcore.engines.group_server")

HOST, DEADLINE_S = "127.0.0.1", 8.0


@pytest.fixture
def server(opened_once: None) -> Iterator[Any]:
    with closing(group_server.group_server(HOST, 1, "gloo", "cpu", DEADLINE_S)) as opened:
        yield opened


def absent(handle: WeightsHandle, held: ExitStack) -> None:
    """It froze before it connected."""


def silent(handle: WeightsHandle, held: ExitStack) -> None:
    """It froze after it had connected, and does not meet the others."""
    held.enter_context(weight_groups._connected(handle.path, Wish(3)))


def in_the_middle(handle: WeightsHandle, held: ExitStack) -> None:
    """It froze with the first tensor."""
    weights = GroupReceiver().weights(handle)
    thread = held.enter_context(ThreadPoolExecutor(1))
    held.callback(weights.close)
    thread.submit(next, weights)


@pytest.mark.slow
@pytest.mark.parametrize("freezes", [absent, silent, in_the_middle])
def test_the_others_have_a_version_well_before_their_deadline(
    server: Any, freezes: Callable[[WeightsHandle, ExitStack], None]
) -> None:
    tensors = {str(number): torch.full((900, 1000), float(number)) for number in range(3)}
    handle = WeightsHandle(1, "nccl", server.offer(tensors.items()), members=3)
    receivers = [GroupReceiver(), GroupReceiver()]
    with ExitStack() as held, ThreadPoolExecutor(2) as threads:
        began = time.monotonic()
        freezes(handle, held)
        tasks = [threads.submit(lambda taker: dict(taker.weights(handle)), receiver) for receiver in receivers]
        for task in tasks:
            found = task.result()
            assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
        assert time.monotonic() - began < 0.75 * DEADLINE_S
    for receiver in receivers:
        receiver.close()


def test_a_version_waits_for_a_stuck_broadcast_well_below_its_deadline(server: Any) -> None:
    tensors = {"one": torch.ones(3)}
    handle = WeightsHandle(2, "nccl", server.offer(tensors.items()), members=1)
    with server._send.__self__._sending:
        began = time.monotonic()
        assert list(dict(GroupReceiver().weights(handle))) == ["one"]
        assert time.monotonic() - began < 0.75 * DEADLINE_S
