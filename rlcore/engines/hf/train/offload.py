"""Moves weights and optimizer state between the device and host memory.

Weights are on the device from the first to the last update of a step. The optimizer's state is there only during the
optimizer step, when the activations of the update are gone.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

from rlcore.engines.freed_memory import yield_device
from rlcore.engines.hf.train import sharded_tensors as parts
from rlcore.engines.hf.train.optimizer import MasterAdamW
from rlcore.engines.hf.train.sharded_tensors import HOST
from rlcore.engines.hf.train.shards import Shards


class Offload:
    """Keeps an engine's weights and optimizer state in host memory while nothing computes with them.

    Without `enabled` everything stays on the device and calls do nothing. Gradients are not moved, because they exist
    only during updates.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: MasterAdamW,
        device: torch.device,
        enabled: bool,
        shards: Shards | None = None,
    ) -> None:
        """`shards`: with a sharded model each rank moves its shards, and gathers none while they are offloaded."""
        self._shards = shards
        self._model, self._optimizer, self._device, self._enabled = model, optimizer, device, enabled
        self._weights_stay = False
        self._weights_here = True
        self._updating = False

    def stay(self) -> None:
        """Keep the weights on the device from now on, because something samples from them between updates."""
        self._weights_stay = True
        self._move_weights(here=True)

    def begin(self) -> bool:
        """Load the weights to the device for updates; False if they are already there."""
        if not self._enabled or self._updating:
            return False
        self._updating = True
        self._move_weights(here=True)
        return True

    @contextmanager
    def state(self) -> Iterator[None]:
        """Context in which the optimizer's state is on the device."""
        if not self._enabled:
            yield
            return
        self._optimizer.to(self._device)
        try:
            yield
        finally:
            self._rest_state()

    def end(self) -> None:
        """Move weights that need not stay to host memory, and the optimizer's state if it is not there.

        Frees the allocator's cache even without `enabled`.
        """
        if self._enabled:
            self._updating = False
            self._rest_state()
            self._move_weights(here=self._weights_stay)
        yield_device(str(self._device))

    @contextmanager
    def weights(self) -> Iterator[None]:
        """Context in which the weights are on the device; afterwards they return to where they were."""
        were_here = self._weights_here
        self._move_weights(here=True)
        try:
            yield
        finally:
            self._move_weights(here=were_here)
            if not were_here:
                yield_device(str(self._device))

    def gathering(self) -> AbstractContextManager[None]:
        """Context in which weights can be gathered; an unsharded model is read where it is."""
        return nullcontext() if self._shards is None else self.weights()

    def _rest_state(self) -> None:
        self._optimizer.to(HOST)
        parts.finish_moves(self._device)

    def _move_weights(self, here: bool) -> None:
        if here == self._weights_here:
            return
        device = self._device if here else HOST
        if self._shards is not None:
            self._shards.scatter()
        for tensor in (*self._model.parameters(), *self._model.buffers()):
            parts.move(tensor, device)
        self._weights_here = here
        parts.finish_moves(self._device)
        if self._shards is not None:
            self._shards.have_moved(here=here)
