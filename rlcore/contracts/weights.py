"""Reads the weights that a `WeightsHandle` names, for rollouts that hold a copy of them.

torch and safetensors are imported when weights are read, so planning can import this module.
"""

from __future__ import annotations

import socket
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING

from rlcore.contracts.weight_groups import taken_alone
from rlcore.contracts.weight_ipc import weights_over_ipc
from rlcore.contracts.weight_memory import mapped_weights
from rlcore.contracts.weight_stream import EXCHANGE_S, tensors_from
from rlcore.errors import WorkerError, boundary
from rlcore.types import WeightsHandle

if TYPE_CHECKING:
    from torch import Tensor


def weights_of(handle: WeightsHandle, *, borrowed: bool = False) -> Generator[tuple[str, Tensor]]:
    """Yields the name and the tensor of each weight, in host memory, one at a time.

    Names are those in the model directory's safetensors files; for the kind `adapter`, those in peft's files.
    WorkerError when the weights cannot be read; for kinds that are sent, also when the version is no longer current.
    For `nccl`, the weights come from the copy in host memory: only `GroupReceiver` takes part in the broadcast. `ipc`
    works for replicas on a CPU, those on other devices call `weights_over_ipc`. Close the generator if you stop early.

    `borrowed`: a tensor may be a view of memory that all replicas read and that later holds the next version. This
    saves a copy if `load_weights()` copies the tensors anyway.
    """
    if handle.kind == "tcp":
        yield from received(handle.path)
    elif handle.kind == "nccl":
        yield from taken_alone(handle.path)
    elif handle.kind == "ipc":
        yield from weights_over_ipc(handle)
    elif handle.kind == "shm":
        for name, tensor in mapped_weights(handle.path):
            yield name, tensor if borrowed else tensor.clone()
    else:
        with boundary(f"weights: reading them in '{handle.path}'", WorkerError):
            check_readable(handle)
            yield from _weights_in(Path(handle.path))


def _weights_in(directory: Path) -> Generator[tuple[str, Tensor]]:
    from safetensors import safe_open

    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - the file is not a mapping
                yield name, file.get_tensor(name)


def check_readable(handle: WeightsHandle) -> None:
    """WorkerError when the handle names a directory without safetensors files; nothing is read."""
    if not handle.is_sent and not any(Path(handle.path).glob("*.safetensors")):
        raise WorkerError(
            f"version {handle.version} of the weights: no safetensors file in '{handle.path}'; rollout.weights_dir "
            "must be a directory that actor and rollout replicas both see"
        )


def received(address: str) -> Generator[tuple[str, Tensor]]:
    """Yields names and tensors, in host memory, as they arrive from HOST:PORT/SECRET.

    WorkerError when nothing is sent, or only a part.
    """
    place, _, secret = address.rpartition("/")
    host, _, port = place.rpartition(":")
    with (
        boundary(f"weights: receiving them from {place}", WorkerError),
        socket.create_connection((host, int(port)), timeout=EXCHANGE_S) as connection,
    ):
        connection.sendall(secret.encode())
        yield from tensors_from(connection)
