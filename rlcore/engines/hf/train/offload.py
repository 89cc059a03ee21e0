"""Moves weights and optimizer state between the device and host memory, once around the updates of a step."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from rlcore.engines.hf.train import sharded_tensors as parts
from rlcore.engines.hf.train.optimizer import MasterAdamW
from rlcore.engines.hf.train.sharded_tensors import HOST


class Offload:
    """Keeps an engine's weights and optimizer state in host memory while nothing here computes with them.

    Without `enabled` everything stays on the device and every call does nothing. Gradients need no move: they exist
    in updates only.
    """

    def __init__(self, model: nn.Module, optimizer: MasterAdamW, device: torch.device, enabled: bool) -> None:
        self._model, self._optimizer, self._device, self._enabled = model, optimizer, device, enabled
        self._weights_stay = False
        self._weights_here = self._state_here = True

    def stay(self) -> None:
        """Keep the weights on the device from now on: something here samples from them between updates."""
        self._weights_stay = True
        self._move_weights(here=True)

    def begin(self) -> bool:
        """Bring everything that an update needs to the device; False if it is there already."""
        if self._state_here:
            return False
        self._move_weights(here=True)
        self._optimizer.to(self._device)
        self._state_here = True
        return True

    def end(self) -> None:
        """Move optimizer state, and weights that need not stay, to host memory."""
        if not self._enabled:
            return
        self._optimizer.to(HOST)
        self._state_here = False
        self._move_weights(here=self._weights_stay)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # what is only cached here is missing where another process shares the device

    @contextmanager
    def weights(self) -> Iterator[None]:
        """Inside, the weights are on the device; afterwards they are where they were."""
        were_here = self._weights_here
        self._move_weights(here=True)
        try:
            yield
        finally:
            self._move_weights(here=were_here)

    def _move_weights(self, here: bool) -> None:
        if here == self._weights_here:
            return
        device = self._device if here else HOST
        for tensor in (*self._model.parameters(), *self._model.buffers()):
            tensor.data = parts.moved(tensor.data, device)
        self._weights_here = here
