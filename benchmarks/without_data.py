"""Fake ranks and tensors without data: the engine's code runs, and the bytes that it holds are counted."""

import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from rlcore.engines.hf.train.ranks import Ranks


class LiveBytes(TorchDispatchMode):
    """Adds up the living storages that operations make or resize; `peak` is the most at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self.now = 0
        self._sizes: dict[int, int] = {}
        self._alive: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:  # the value of a fake tensor: finite, equal, the first
            return args[0].dtype == torch.bool or (0.0 if args[0].is_floating_point() else 0)
        result = func(*args, **(kwargs or {}))
        for tensor in _pytree.tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                # results within an operation of a DTensor are not dispatched here
                here = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
                self._see(here.untyped_storage())
        return result

    def resized(self, storage: Any, size: int) -> None:
        """Record the new size of a storage, because FSDP frees storages without an operation."""
        key = storage._cdata
        if key in self._alive:
            self._count(size - self._sizes[key])
            self._sizes[key] = size

    def _see(self, storage: Any) -> None:
        key = storage._cdata
        if key in self._alive:
            self.resized(storage, storage.nbytes())
            return

        def freed(_: object) -> None:
            self._alive.pop(key, None)
            self.now -= self._sizes.pop(key, 0)

        self._sizes[key] = storage.nbytes()
        self._alive[key] = weakref.ref(storage, freed)
        self._count(self._sizes[key])

    def _count(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)

    def phase(self) -> tuple[int, int]:
        """(most bytes since the last phase, bytes that live now)."""
        found = self.peak, self.now
        self.peak = self.now
        return found


class FakeFile:
    """A file of safetensors that holds the tensors of a model, without data."""

    shapes: Mapping[str, torch.Size] = {}

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __exit__(self, *_: Any) -> None: ...

    def keys(self) -> list[str]:
        return list(self.shapes)

    def get_slice(self, name: str) -> "FakeSlice":
        return FakeSlice(self.shapes[name])


class FakeSlice:
    """One tensor of a `FakeFile`, in bfloat16."""

    def __init__(self, shape: torch.Size) -> None:
        self._shape = shape

    def get_shape(self) -> list[int]:
        return list(self._shape)

    def get_dtype(self) -> str:
        return "BF16"

    def __getitem__(self, chosen: Any) -> Tensor:
        return torch.empty(torch.empty(self._shape, device="meta")[chosen].shape, dtype=torch.bfloat16)


class OneRank(Ranks):
    """Rank 0 of a group whose other ranks do not exist."""

    def __init__(self, num: int) -> None:
        self.rank, self.num, self.device = 0, num, torch.device("cpu")
        self.context = None
        self.place, self.order = 0, [*range(num)]

    def gather(self, value: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [dict(value)]


@contextmanager
def without_data(num: int, live: LiveBytes) -> Iterator[None]:
    """In the block, tensors have no data, and a fake group of `num` ranks sends nothing."""
    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, size: int) -> Any:
        live.resized(storage, size)
        return resize(storage, size)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, {"HF_DEACTIVATE_ASYNC_LOAD": "1"}))  # a mode is per thread
        stack.enter_context(mock.patch("transformers.modeling_utils.safe_open", FakeFile))
        stack.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", resized))
        dist.init_process_group("fake", rank=0, world_size=num, store=FakeStore())
        stack.callback(dist.destroy_process_group)
        mesh = init_device_mesh("cpu", (num,))  # it reads values of its tensors
        stack.enter_context(mock.patch("rlcore.engines.hf.train.start.mesh_of", return_value=mesh))
        stack.enter_context(mock.patch.object(Tensor, "numpy", _zeros))
        stack.enter_context(mock.patch.object(Tensor, "tolist", lambda tensor: _zeros(tensor).tolist()))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(live)
        yield


def _zeros(tensor: Tensor) -> Any:
    """Zeros as the values of a tensor without data."""
    return np.zeros(tensor.shape, dtype=np.float32 if tensor.is_floating_point() else np.int64)
