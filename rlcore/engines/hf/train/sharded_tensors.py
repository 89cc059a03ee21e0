"""Tensors on a device or in host memory, whole or sharded over ranks.

Shards are rows, split as in FSDP2, in memory and in the files of a checkpoint.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

HOST = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class Rows:
    """Consecutive rows of a tensor, or a scalar."""

    tensor: Tensor
    """The rows, on any device."""
    first: int
    """The index of the first row in the whole tensor."""
    shape: torch.Size
    """Of the whole tensor."""

    def moved_to(self, tensor: Tensor) -> "Rows":
        """The same rows, held elsewhere."""
        return replace(self, tensor=tensor)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device; the same tensor if it is already there."""
    return tensor.to(device)


def begin_move(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device or in host memory; its values are there after `finish_moves`.

    Copies from an accelerator go to pinned memory, so copies in both directions run at the full speed of the bus,
    without a wait after each.
    """
    if device == HOST and tensor.device.type == "cuda":
        return torch.empty_like(tensor, device=HOST, pin_memory=True).copy_(tensor, non_blocking=True)
    return tensor.to(device, non_blocking=tensor.device == HOST and tensor.is_pinned())


@torch.no_grad()
def move(tensor: Tensor, device: torch.device) -> None:
    """Begin to move a tensor, or this rank's shard of it, to a device or to host memory, in place."""
    held = holder(tensor)
    held.data = begin_move(held.data, device)


def holder(tensor: Tensor) -> Tensor:
    """The tensor whose `data` is this rank's shard; `own` returns a view of it."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def finish_moves(device: torch.device) -> None:
    """Wait for pending moves from and to an accelerator."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def placeholder(tensor: Tensor) -> Tensor:
    """NaNs with the tensor's shape, dtype and device, in the memory of one element."""
    return torch.full((), float("nan"), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)


def rows_of(num_rows: int, part: int, num_parts: int) -> slice:
    """The rows of a part; all parts are equally large, except that the last ones have fewer rows or none."""
    size = -(-num_rows // num_parts)
    return slice(min(part * size, num_rows), min((part + 1) * size, num_rows))


def own(tensor: Tensor) -> Tensor:
    """This rank's shard; all of an unsharded tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def part_of(mesh: DeviceMesh) -> tuple[int, int]:
    """(part, number of parts) of this rank's shards; the last dimension of a mesh shards, one before it replicates."""
    last = mesh.ndim - 1
    return int(mesh.get_local_rank(last)), int(mesh.size(last))


def placements(mesh: DeviceMesh) -> list[Placement]:
    """Rows over the last dimension of a mesh, the same ones over a dimension before it."""
    return [*(Replicate() for _ in range(mesh.ndim - 1)), Shard(0)]


def held(tensor: Tensor) -> Rows:
    """The rows of a tensor that this rank holds; all of an unsharded one."""
    first = rows_of(len(tensor), *place(tensor)).start if tensor.ndim else 0
    return Rows(own(tensor), first, tensor.shape)


def place(tensor: Tensor) -> tuple[int, int]:
    """(part, number of parts) of this rank's shard of a tensor."""
    return part_of(tensor.device_mesh) if isinstance(tensor, DTensor) else (0, 1)


@torch.no_grad()
def put(target: Tensor, whole: Tensor) -> None:
    """Copy this rank's part from a whole tensor, or from its shard."""
    if isinstance(target, DTensor) and not isinstance(whole, DTensor):
        whole = whole[rows_of(len(whole), *place(target))]
    own(target).copy_(own(whole))


def gathered(tensor: Tensor) -> Tensor:
    """The whole tensor on every rank; for a sharded tensor all ranks must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(part: Tensor, target: Tensor) -> Tensor:
    """This rank's part as the same kind of tensor as `target`, on the part's device."""
    if not isinstance(target, DTensor):
        return part
    return DTensor.from_local(
        part,
        target.device_mesh,
        target.placements,
        run_check=False,
        shape=target.shape,
        stride=target.stride(),
    )
