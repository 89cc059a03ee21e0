"""Tensors on their way from the process that trains to those of an engine that samples, without a file in between.

They travel over gloo between CPUs and over nccl between GPUs, in a group of processes that lasts for one handover: the
sender is rank 0, the engine's workers are the ranks behind it. It has no password, as nothing of torch.distributed has;
whoever is in the network of the nodes could listen. On one machine it listens on the loopback interface.
"""

import json
import socket
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from rlcore.errors import WorkerError, boundary

MESSAGE_BYTES = 64 << 20
"""Tensors travel together up to this size, which each side holds once more for that time."""
ALIGNMENT = 16
"""Bytes of which a tensor's place in a message is a multiple, whatever its type."""
MEET_S = 300.0
"""Until the other side has come."""
EXCHANGE_S = 600.0
"""Of one message."""
DONE_S = 60.0
"""Until the last message has been taken up."""


@dataclass(frozen=True)
class Parcel:
    """A tensor, as the receivers are told of it beforehand."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Its own, without what fills up its place."""
        return prod(self.shape) * int(getattr(torch, self.dtype).itemsize)

    @property
    def room(self) -> int:
        """Bytes of its place in a message."""
        return -(-self.num_bytes // ALIGNMENT) * ALIGNMENT


class Offer:
    """The sender's side, open for one engine."""

    def __init__(self, host: str, device: torch.device) -> None:
        """Listen on this node's address; WorkerError when that is not possible."""
        self._host, self._device = host, device
        with boundary(f"weights: listening on {host}", WorkerError), socket.create_server((host, 0)) as server:
            port = server.getsockname()[1]
            self._store = TCPStore(
                host,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=MEET_S),
                master_listen_fd=server.detach(),
            )
        self.address = f"{host}:{port}"

    @property
    def is_awaited(self) -> bool:
        """Whether the engine's workers have come: until then `send` would wait."""
        return bool(self._store.check(["size"]))

    def send(self, tensors: Mapping[str, Tensor]) -> None:
        """Every worker of the engine has all of them when this returns; WorkerError when one does not come or fails."""
        parcels = [
            Parcel(name, str(each.dtype).removeprefix("torch."), tuple(each.shape)) for name, each in tensors.items()
        ]
        with boundary(f"weights: sending them from {self.address}", WorkerError):
            self._store.set("parcels", json.dumps([(each.name, each.dtype, each.shape) for each in parcels]))
            size = int(self._store.get("size"))
            group = _group(self._store, 0, size, self._device, self._host)
            for message in messages(parcels):
                buffer = torch.empty(sum(each.room for each in message), dtype=torch.uint8, device=self._device)
                for parcel, place in _places(message, buffer):
                    place.copy_(tensors[parcel.name].detach().reshape(-1).view(torch.uint8))
                _broadcast(group, buffer)
            done = [f"done/{rank}" for rank in range(1, size)]
            self._store.wait(done, timedelta(seconds=DONE_S))
            if any(self._store.get(each) != b"yes" for each in done):
                raise WorkerError("one of the engine's workers could not take them up")


def received(address: str, rank: int, num: int, device: torch.device) -> Generator[tuple[str, Tensor]]:
    """Names and tensors as they come, for worker `rank` of the `num` of an engine.

    WorkerError when the sender does not answer, or fails.
    """
    host, _, port = address.rpartition(":")
    with boundary(f"weights: receiving them from {address}", WorkerError):
        store = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=MEET_S))
        store.set("size", str(1 + num))
        parcels = [Parcel(name, dtype, tuple(shape)) for name, dtype, shape in json.loads(store.get("parcels"))]
        group = _group(store, 1 + rank, 1 + num, device, _own_address(host, int(port)))
    outcome = "no"
    try:
        for message in messages(parcels):
            with boundary(f"weights: receiving them from {address}", WorkerError):
                buffer = torch.empty(sum(each.room for each in message), dtype=torch.uint8, device=device)
                _broadcast(group, buffer)
            for parcel, place in _places(message, buffer):
                yield parcel.name, place.view(getattr(torch, parcel.dtype)).view(parcel.shape)
        outcome = "yes"
    finally:  # also where what takes them up has failed
        with suppress(RuntimeError):  # the sender has gone
            store.set(f"done/{1 + rank}", outcome)


def messages(parcels: Sequence[Parcel]) -> Iterator[list[Parcel]]:
    """The parcels, in order, of each message: several up to MESSAGE_BYTES, or one that is larger."""
    message: list[Parcel] = []
    for parcel in parcels:
        if message and sum(each.room for each in message) + parcel.room > MESSAGE_BYTES:
            yield message
            message = []
        message.append(parcel)
    if message:
        yield message


def _places(message: Sequence[Parcel], buffer: Tensor) -> Iterator[tuple[Parcel, Tensor]]:
    begin = 0
    for parcel in message:
        yield parcel, buffer[begin : begin + parcel.num_bytes]
        begin += parcel.room


def _group(store: Store, rank: int, size: int, device: torch.device, address: str) -> Any:
    """Not one of torch's named groups, which know the processes of one program alone."""
    inner, limit = PrefixStore("group", store), timedelta(seconds=EXCHANGE_S)
    if device.type == "cuda":
        nccl: Any = distributed.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = limit
        return nccl(inner, rank, size, options)
    gloo: Any = distributed.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = limit
    options._devices = [gloo.create_device(hostname=address)]
    return gloo(inner, rank, size, options)


def _broadcast(group: Any, buffer: Tensor) -> None:
    options = distributed.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    group.broadcast([buffer], options).wait()
    if buffer.device.type == "cuda":
        torch.cuda.synchronize(buffer.device)  # what is read next is on no stream of the group's


def _own_address(host: str, port: int) -> str:
    """This node's address, as the sender's node reaches it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # of a datagram socket: nothing is sent
        return str(probe.getsockname()[0])
