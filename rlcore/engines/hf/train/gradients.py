"""Accumulates weight gradients in place, without a temporary.

torch computes the gradient of a weight in a separate tensor and then adds it to the sum over micro-batches. On a CPU,
where updates are bound by memory, the matrix product can add to the sum directly. The gradient of an embedding is as
large as the vocabulary, but only the rows of tokens that occur are not zero. If a weight is also used in another way,
that part of its gradient is computed as usual.

Letters: N tokens, I and O inputs and outputs of a layer, V vocabulary, H hidden size.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def adding_gradients(model: nn.Module) -> Iterator[None]:
    """Context in which float32 and float64 linear layers and embeddings on a CPU add to their weights' `grad` directly.

    Forward and backward pass both belong inside. `torch.autograd.grad` does not see the gradients of these weights.
    """
    forwards = {layer: forward for layer in model.modules() if (forward := _adding_forward(layer)) is not None}
    for layer, forward in forwards.items():
        layer.forward = forward
    try:
        yield
    finally:
        for layer in forwards:
            del layer.forward


def can_add(weight: Tensor) -> bool:
    """True if the gradient of a weight may be added to `weight.grad` directly: it is trained, and is its own master."""
    return weight.requires_grad and weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.float64)


def add_product(weight_OI: Tensor, grad_NO: Tensor, inputs_NI: Tensor) -> None:
    """Add the gradient of a linear layer's weight."""
    if weight_OI.grad is None:
        weight_OI.grad = grad_NO.T @ inputs_NI
    else:
        weight_OI.grad.addmm_(grad_NO.T, inputs_NI)


def _adding_forward(layer: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """The layer's forward inside the block; None if it stays unchanged."""
    if "forward" in vars(layer):
        return None
    if type(layer) is nn.Linear and can_add(layer.weight):
        return partial(_linear, layer)
    if type(layer) is nn.Embedding and can_add(layer.weight):
        plain = layer.max_norm is None and not layer.scale_grad_by_freq and not layer.sparse
        return partial(_embedding, layer) if plain else None
    return None


def _linear(layer: nn.Linear, inputs: Tensor) -> Tensor:
    output: Tensor = _Linear.apply(inputs, layer.weight, layer.bias, layer)  # type: ignore[no-untyped-call]
    return output


def _embedding(layer: nn.Embedding, token_ids: Tensor) -> Tensor:
    output: Tensor = _Embedding.apply(token_ids, layer.weight, layer)  # type: ignore[no-untyped-call]
    return output


class _Linear(torch.autograd.Function):
    """`nn.functional.linear`. The weight is an argument: the output has a gradient even if the input has none."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight_OI: Tensor, bias_O: Tensor | None, layer: nn.Linear) -> Tensor:
        ctx.save_for_backward(inputs, weight_OI)
        ctx.layer = layer
        return nn.functional.linear(inputs, weight_OI, bias_O)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight_OI = ctx.saved_tensors
        grad_NO = grads[0].reshape(-1, len(weight_OI))
        add_product(ctx.layer.weight, grad_NO, inputs.reshape(-1, weight_OI.shape[1]))
        grad_inputs = (grad_NO @ weight_OI).view(inputs.shape) if ctx.needs_input_grad[0] else None
        return grad_inputs, None, grad_NO.sum(dim=0) if ctx.needs_input_grad[2] else None, None


class _Embedding(torch.autograd.Function):
    """`nn.functional.embedding`, whose padding token gets no gradient."""

    @staticmethod
    def forward(ctx: Any, token_ids: Tensor, weight_VH: Tensor, layer: nn.Embedding) -> Tensor:
        ctx.save_for_backward(token_ids)
        ctx.layer = layer
        return nn.functional.embedding(token_ids, weight_VH)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        (token_ids,) = ctx.saved_tensors
        weight_VH, token_ids_N = ctx.layer.weight, token_ids.flatten()
        grad_NH = grads[0].reshape(-1, weight_VH.shape[1])
        if ctx.layer.padding_idx is not None:
            grad_NH = grad_NH.masked_fill((token_ids_N == ctx.layer.padding_idx)[:, None], 0.0)
        if weight_VH.grad is None:
            weight_VH.grad = torch.zeros_like(weight_VH)
        weight_VH.grad.index_add_(0, token_ids_N, grad_NH)
        return None, None, None
