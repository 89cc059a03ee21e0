"""Linear layers with weights packed for multiplying few rows on a CPU.

A decoding pass multiplies each weight matrix with a few dozen rows, so the time to reorder weights for the product
matters. oneDNN reorders them once for all passes until the weights change: measured 20 to 30 % less time for 64 rows,
at the cost of a second copy of the weights. Layers with the same input, such as queries, keys and values, become one
product.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rlcore.engines.hf.train.half_products import multiplies_half

SMALLEST = 2**16
"""Minimum number of weights of a product that is worth packing."""


def can_pack(weight: Tensor) -> bool:
    """True if this build of torch has the packed operations, and this CPU multiplies weights of that format."""
    operations: Any = torch.backends.mkldnn
    known = weight.device.type == "cpu" and (weight.dtype == torch.float32 or multiplies_half(weight))
    return known and operations.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@contextmanager
def watching(model: nn.Module) -> Iterator[list[tuple[nn.Linear, Tensor]]]:
    """Records the input tensor of each linear layer while the model computes inside the block."""
    calls: list[tuple[nn.Linear, Tensor]] = []
    hooks = [
        layer.register_forward_pre_hook(lambda module, inputs: calls.extend((module, tensor) for tensor in inputs))
        for layer in model.modules()
        if type(layer) is nn.Linear
    ]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def siblings_of(calls: Sequence[tuple[nn.Linear, Tensor]]) -> list[tuple[nn.Linear, ...]]:
    """The groups of layers that always had the same input tensor."""
    by_tensor: dict[int, list[nn.Linear]] = {}
    for layer, states in calls:
        by_tensor.setdefault(id(states), []).append(layer)
    sets = list(dict.fromkeys(map(tuple, by_tensor.values())))
    seen = [layer for group in sets for layer in group]
    return [group for group in sets if len(group) > 1 and all(seen.count(layer) == 1 for layer in group)]


class PackedLinears:
    """Packed copies of a model's linear weights, valid until the weights change."""

    def __init__(
        self,
        model: nn.Module,
        num_rows: int,
        siblings: Sequence[tuple[nn.Linear, ...]] = (),
        smallest: int = SMALLEST,
    ) -> None:
        """`num_rows`: the most frequent number of rows; `siblings`: groups of layers with the same input."""
        layers = [
            layer
            for layer in model.modules()
            if type(layer) is nn.Linear and can_pack(layer.weight) and "forward" not in vars(layer)
        ]
        sets = [sibling for sibling in siblings if set(layers).issuperset(sibling) and _fit_together(sibling)]
        joined = {layer for group in sets for layer in group}
        sets += [(layer,) for layer in layers if layer not in joined]
        self._products = [
            _Product(group, num_rows) for group in sets if sum(layer.weight.numel() for layer in group) >= smallest
        ]
        self._forwards: dict[nn.Module, Callable[[Tensor], Tensor]] = {
            layer: forward for product in self._products for layer, forward in product.forwards()
        }

    @property
    def num_products(self) -> int:
        """The number of products per pass, if every layer is used once."""
        return len(self._products)

    def product_of(self, layers: Sequence[nn.Linear]) -> "Callable[[Tensor, Tensor | None], Tensor] | None":
        """The concatenated product of layers with the same input, with an optional summand.

        None if the layers do not form a product.
        """
        return next((product.multiply for product in self._products if product.layers == tuple(layers)), None)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Context in which the model's layers use the copies, without gradients."""
        for layer, forward in self._forwards.items():
            vars(layer)["forward"] = forward  # setattr looks for parameters first: milliseconds per token
        try:
            yield
        finally:
            for layer in self._forwards:
                del vars(layer)["forward"]
            for product in self._products:
                product.clear()


def _fit_together(layers: Sequence[nn.Linear]) -> bool:
    return len({layer.bias is None for layer in layers}) == 1 and len({layer.in_features for layer in layers}) == 1


class _Product:
    """The weights of layers with the same input, packed into one matrix product."""

    def __init__(self, layers: Sequence[nn.Linear], num_rows: int) -> None:
        self.layers = tuple(layers)
        weights, biases = [layer.weight.detach() for layer in layers], [layer.bias for layer in layers]
        whole = torch.cat(weights) if len(layers) > 1 else weights[0]
        self._packed = torch.ops.mkldnn._reorder_linear_weight(whole, num_rows)
        self._bias = None if biases[0] is None else torch.cat([bias.detach() for bias in biases])
        self._sizes = [len(weight) for weight in weights]
        self._states: Tensor | None = None
        """The last input states."""
        self._parts: Sequence[Tensor] = ()

    def forwards(self) -> Iterator[tuple[nn.Linear, Callable[[Tensor], Tensor]]]:
        """The forward function of each layer."""
        if len(self.layers) == 1:
            yield self.layers[0], self.multiply
            return
        for index, layer in enumerate(self.layers):
            yield layer, partial(self._part, index)

    def clear(self) -> None:
        """Release the last product."""
        self._states, self._parts = None, ()

    def _part(self, index: int, states: Tensor) -> Tensor:
        if states is not self._states:
            self._parts, self._states = torch.split(self.multiply(states), self._sizes, dim=-1), states
        return self._parts[index]

    def multiply(self, states: Tensor, added: Tensor | None = None) -> Tensor:
        """The whole product, with an optional summand."""
        if added is not None:
            total: Tensor = torch.ops.mkldnn._linear_pointwise.binary(states, added, self._packed, self._bias, "add")
            return total
        product: Tensor = torch.ops.mkldnn._linear_pointwise(states, self._packed, self._bias, "none", [], "")
        return product
