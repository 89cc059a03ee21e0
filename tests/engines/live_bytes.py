"""Counts the memory of tensors while code runs."""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Adds up the storages that operations make, for as long as they live; `peak` is the most at a time."""

    def __init__(self, there_already: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in there_already}
        self._alive: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in _pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor.untyped_storage())
        self.peak = max(self.peak, self._now)
        return result

    def _see(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or key in self._alive:
            return

        def freed(_: object) -> None:
            self._now -= size
            self._alive.pop(key, None)

        self._now += size
        self._alive[key] = weakref.ref(storage, freed)
