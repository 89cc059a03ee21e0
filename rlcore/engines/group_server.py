"""Broadcasts weights in buckets to all replicas at once (`rlcore.contracts.weight_groups`).

A group lives as long as its member processes. If it breaks in the middle of a version, the connections of all members
are closed at once, and the remaining ones fetch that version from the copy in host memory.
"""

import json
import logging
import math
import secrets
import socket
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from rlcore.contracts import weight_groups
from rlcore.contracts.weight_groups import BroadcastGroup, Invitation, Wish, watch
from rlcore.contracts.weight_stream import read_message, send_message
from rlcore.engines.weight_buckets import packed
from rlcore.engines.weight_server import WeightsServer, host_copies, send_whole
from rlcore.errors import WorkerError, boundary

distributed: Any = torch.distributed
"""torch.distributed, untyped because its stub does not export the stores."""
logger = logging.getLogger(__name__)

TURN_S = 180.0
"""Seconds that a version waits for the broadcast of the one before, as long as its receivers wait for an invitation."""
MIB = 2**20


def group_server(
    host: str, bucket_mib: int, transport: str, device: str, deadline_s: float = math.inf
) -> WeightsServer[dict[str, Tensor]]:
    """Serves the processes of replicas on any machine; WorkerError when it cannot listen.

    `transport` carries the broadcasts: nccl between CUDA devices (`device` is this process's), or gloo between hosts.
    A receiver has `deadline_s` for a version: no wait for one that hangs takes more than a quarter of that, so that the
    others can still read the copy.
    """
    with boundary(f"weights: listening on {host}", WorkerError):
        listening = socket.create_server((host, 0))
    groups = Groups(host, bucket_mib * MIB, transport, device if transport == "nccl" else "cpu", deadline_s / 4)
    place = f"{host}:{listening.getsockname()[1]}"
    return WeightsServer(listening, place, host_copies, groups.serve, groups.abandon)


@dataclass(eq=False)
class _Meeting:
    """Receivers of one version that are about to form a group."""

    tensors: Mapping[str, Tensor]
    members: list[tuple[socket.socket, Wish]] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    @property
    def is_full(self) -> bool:
        wish = self.members[0][1]
        return len(self.members) >= wish.members * wish.processes


class Groups:
    """The group of the current receivers; the thread of the first one broadcasts for all."""

    def __init__(self, host: str, bucket_bytes: int, transport: str, device: str, limit_s: float) -> None:
        """`limit_s`: no wait for a receiver or an earlier broadcast takes longer."""
        self._host, self._bucket_bytes, self._limit_s = host, bucket_bytes, limit_s
        self._transport, self._device = transport, device
        self._changed = threading.Condition()
        self._meeting: _Meeting | None = None
        self._sending = threading.Lock()
        self._is_stuck = False
        """A thread that sent an earlier version did not return."""
        self._group: BroadcastGroup | None = None

    def serve(self, connection: socket.socket, tensors: Mapping[str, Tensor]) -> None:
        """Send a receiver all tensors, individually or in a broadcast with the others, as it asks."""
        wish = Wish(**json.loads(read_message(connection)))
        if not wish.members:
            send_whole(connection, tensors)
            return
        with self._changed:
            meeting = self._meeting
            if meeting is None or meeting.tensors is not tensors:
                meeting = self._meeting = _Meeting(tensors)
            meeting.members.append((connection, wish))
            is_first = len(meeting.members) == 1
            self._changed.notify_all()
            if is_first:
                self._changed.wait_for(lambda: meeting.is_full, min(weight_groups.MEET_S, self._limit_s))
                if self._meeting is meeting:
                    self._meeting = None
        if not is_first:
            meeting.over.wait()
            return
        try:
            self._send_in_turn(meeting)
        finally:
            meeting.over.set()

    def _send_in_turn(self, meeting: _Meeting) -> None:
        """Broadcast when the broadcast of the version before has ended.

        If that does not end, this version and later ones are read from the copy: NCCL cannot be left while it connects
        to a member that has gone.
        """
        self._is_stuck = not self._sending.acquire(timeout=0.0 if self._is_stuck else min(TURN_S, self._limit_s))
        if self._is_stuck:
            logger.warning("weights: an earlier broadcast has not ended; replicas read the copy, one by one")
            return
        try:
            self._send(meeting)
        finally:
            self._sending.release()

    def _send(self, meeting: _Meeting) -> None:
        """Broadcast all tensors; if that fails the group ends, and so do the threads of all members."""
        members = [(connection, wish) for connection, wish in meeting.members if _is_there(connection)]
        connections = [connection for connection, _ in members]
        try:
            if members:
                self._broadcast(self._gathered(members), connections, meeting.tensors)
        except (OSError, EOFError, RuntimeError) as error:  # torch's errors are RuntimeErrors
            logger.warning("weights: a broadcast to %d processes broke: %s", len(connections), str(error))
            for connection in connections:  # first, so that members leave because of that and not of an error of NCCL
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            self.abandon()

    def abandon(self) -> None:
        """Leave the group; the next version makes a new one."""
        if self._group is not None:
            self._group.abandon()
            self._group = None

    def _gathered(self, members: Sequence[tuple[socket.socket, Wish]]) -> BroadcastGroup:
        """The group of exactly these receivers: their existing one, or a new one."""
        held, size = self._group, len(members) + 1
        if held is not None and held.size == size and all(wish.group == held.name for _, wish in members):
            for connection, _ in members:
                _invite(connection, Invitation(held.name, self._bucket_bytes))
            return held
        self.abandon()
        name = secrets.token_hex(8)
        listening = socket.create_server((self._host, 0))
        port = listening.getsockname()[1]
        store = distributed.TCPStore(
            self._host,
            port,
            is_master=True,
            timeout=timedelta(seconds=min(weight_groups.MEET_S, self._limit_s)),
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
        for rank, (connection, _) in enumerate(members, 1):
            _invite(connection, Invitation(name, self._bucket_bytes, port, rank, size, self._transport, self._limit_s))
        if self._transport == "nccl":
            torch.cuda.set_device(self._device)
        inside = distributed.PrefixStore(name, store)
        self._group = BroadcastGroup(name, self._transport, inside, self._host, 0, size, limit_s=self._limit_s)
        return self._group

    def _broadcast(
        self, group: BroadcastGroup, connections: list[socket.socket], tensors: Mapping[str, Tensor]
    ) -> None:
        bucket = torch.empty(self._bucket_bytes, dtype=torch.uint8, device=self._device)
        for pieces, used in packed(tensors.items(), bucket):
            header = json.dumps([piece.fields() for piece in pieces]).encode()
            for connection in connections:
                send_message(connection, header)
            group.broadcast(used, lambda: watch(connections))
        for connection in connections:
            send_message(connection, json.dumps([]).encode())


def _invite(connection: socket.socket, invitation: Invitation) -> None:
    send_message(connection, json.dumps(vars(invitation)).encode())


def _is_there(connection: socket.socket) -> bool:
    """False for a receiver that disconnected while it waited for the others."""
    try:
        watch([connection], 0.0)
    except (OSError, EOFError):
        return False
    return True
