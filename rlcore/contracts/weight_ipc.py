"""Weight sync between processes on one device, through buckets of its memory (CUDA IPC): the protocol and the receiver.

Each rank of the actor listens on a Unix socket. A receiver connects to the rank on its device and sends the secret of
the version, with the number of replicas that load it. When all have connected, every rank gathers the weights. It puts
them into a bucket, describes this in a header, and fills the bucket again when its receivers have confirmed that they
copied everything. The weights do not pass through host memory.

On a CPU the bucket is memory that the processes share. The actor keeps no copy of a version, and sends it again to a
replica that was restarted (`rlcore.contracts.actor.ActorWorker.send_weights`).
"""

from __future__ import annotations

import json
import mmap
import os
import socket
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcore.contracts.weight_groups import Wish
from rlcore.contracts.weight_memory import ADDRESSES, connect_here, received_file
from rlcore.contracts.weight_stream import EXCHANGE_S, PiecesOfTensors, framed, headers, read_message
from rlcore.errors import WorkerError, boundary
from rlcore.types import WeightsHandle

if TYPE_CHECKING:
    import torch
    from torch import Tensor

COPIED = b"1"
"""The receiver's confirmation that it has copied a bucket."""
WAITS = "a quarter of rollout.weights_deadline_s"
"""The longest wait of the sender for one receiver, in an error."""
AT = "@"
"""Separates the name of a device from the address of the rank on it."""


def this_machine() -> str:
    """A name of this machine, as the device that all of its CPUs are."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def device_name(device: torch.device | str) -> str:
    """A name of the device that all processes of a machine share, whatever devices they see."""
    import torch

    found = torch.device(device)
    return this_machine() if found.type == "cpu" else str(torch.cuda.get_device_properties(found).uuid)


def weights_over_ipc(
    handle: WeightsHandle, device: torch.device | str = "cpu", processes: int = 1
) -> Generator[tuple[str, Tensor]]:
    """Yields the name and the tensor of each weight of kind `ipc`, on `device`.

    The replica has `processes` processes, and each calls this. WorkerError when no rank of the actor is on the device,
    or when not all weights come. Close the generator if you stop early.
    """
    address = _address_on(handle, device_name(device))
    name, _, secret = address.rpartition("/")
    with (
        boundary(f"weights: receiving them over IPC from '{name}', which waits {WAITS} for a receiver", WorkerError),
        closing(socket.socket(socket.AF_UNIX)) as connection,
    ):
        connection.settimeout(EXCHANGE_S)
        connect_here(connection, name, "ipc")
        wish = json.dumps(vars(Wish(handle.members, processes))).encode()
        connection.sendall(secret.encode() + framed(wish))  # at once: a sender that refuses the secret closes
        connection.settimeout(None)  # it waits for other replicas, too, and rollout.weights_deadline_s limits that
        yield from _tensors(connection, device)


def _tensors(connection: socket.socket, device: torch.device | str) -> Generator[tuple[str, Tensor]]:
    """The tensors of all buckets, each copied from its bucket before the sender fills that again."""
    bucket = _bucket(connection, device)
    put_together = PiecesOfTensors(device)
    for pieces in headers(connection):
        complete = []
        for piece in pieces:
            put_together.place(piece).copy_(bucket[piece.offset : piece.offset + piece.num_bytes])
            if (tensor := put_together.finished(piece)) is not None:
                complete.append((piece.name, tensor))
        wait_for_copies(bucket)
        connection.sendall(COPIED)
        yield from complete


def wait_for_copies(bucket: Tensor) -> None:
    """Wait until all copies from or to the bucket that this thread has started are done."""
    if bucket.is_cuda:
        import torch

        torch.cuda.current_stream(bucket.device).synchronize()


def _address_on(handle: WeightsHandle, device: str) -> str:
    """SOCKET/SECRET of the first rank on the device."""
    for part in handle.path.split(ADDRESSES):
        name, _, address = part.partition(AT)
        if name == device:
            return address
    raise WorkerError(
        f"version {handle.version} of the weights: no rank of the actor is on device {device}; "
        "rollout.weight_sync=ipc needs one on each device of the rollout; choose shm, tcp or disk"
    )


def _bucket(connection: socket.socket, device: torch.device | str) -> Tensor:
    """The sender's bucket, mapped into this process."""
    import torch

    shared = json.loads(read_message(connection))
    if not isinstance(shared, int):
        return _on_device(shared, device)
    file = received_file(connection)
    try:
        return torch.frombuffer(mmap.mmap(file, shared), dtype=torch.uint8)
    finally:
        os.close(file)


def shared_on_device(bucket: Tensor) -> list[Any]:
    """The fields from which another process on the CUDA device of a bucket can map it, in a form for JSON."""
    storage: Any = bucket.untyped_storage()  # untyped in its stub; torch.multiprocessing uses the same two
    fields = storage._share_cuda_()
    return [field.hex() if isinstance(field, bytes) else field for field in fields]


def _on_device(shared: list[Any], device: torch.device | str) -> Tensor:
    """The bucket of `shared_on_device`, on this process's number of that device."""
    import torch

    _, handle, size, offset, counter, counter_offset, event, must_wait = shared
    storages: Any = torch.UntypedStorage
    storage = storages._new_shared_cuda(
        torch.device(device).index or 0,
        bytes.fromhex(handle),
        size,
        offset,
        bytes.fromhex(counter),
        counter_offset,
        bytes.fromhex(event),
        must_wait,
    )
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
