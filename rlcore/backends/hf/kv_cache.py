"""A key-value cache for transformers models whose rows can be copied, dropped and extended without copying the rest."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

GROWTH = 128
"""Positions by which a layer's store grows at least."""


class GrowingLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """One layer: keys and values are views of stores with room for more positions.

    transformers' DynamicLayer copies the whole cache for every token; this one copies it once in `GROWTH` tokens.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)  # type: ignore[no-untyped-call]
        self._stores: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """All keys and values (rows, heads, positions, size), with the new ones at the end."""
        start = self.get_seq_length()
        end = start + key_states.shape[2]
        if self._stores is None or end > self._stores[0].shape[2]:
            stores = _grown(key_states, start, end), _grown(value_states, start, end)
            if start:
                for new, old in zip(stores, self._stores or (), strict=True):
                    new[:, :, :start] = old[:, :, :start]
            self._stores = stores
            self.is_initialized = True
        self._stores[0][:, :, start:end] = key_states
        self._stores[1][:, :, start:end] = value_states
        return self._view(end)

    def take(self, rows_R: Tensor) -> None:
        """Keep these rows, in this order; a row may come more than once."""
        end = self.get_seq_length()
        if self._stores is not None:
            self._stores = self._stores[0].index_select(0, rows_R), self._stores[1].index_select(0, rows_R)
            self._view(end)

    def _view(self, end: int) -> tuple[Tensor, Tensor]:
        if self._stores is None:
            raise ValueError("the layer holds nothing yet")
        views = self._stores[0][:, :, :end], self._stores[1][:, :, :end]
        self.keys, self.values = views
        return views


class GrowingCache(Cache):
    """The cache of a whole model; its layers appear as the model first reaches them.

    All layers keep all positions: a layer with a sliding window masks what is out of its window.
    """

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=GrowingLayer)

    def take(self, rows_R: Tensor) -> None:
        """Keep these rows, in this order; a row may come more than once."""
        for layer in self.layers:
            if isinstance(layer, GrowingLayer):
                layer.take(rows_R)


def _grown(states: Tensor, start: int, end: int) -> Tensor:
    """An empty store for at least `end` positions."""
    rows, heads, _, size = states.shape
    capacity = end + max(GROWTH, start // 4)
    return torch.empty((rows, heads, capacity, size), dtype=states.dtype, device=states.device)
