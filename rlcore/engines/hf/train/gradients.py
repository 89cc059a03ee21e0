"""Accumulates weight gradients in place, without a temporary as large as the weight.

torch computes the gradient of a weight in a separate tensor and then adds it to the sum over micro-batches. On a CPU,
where updates are bound by memory, the matrix product can add to the sum directly. The sum of a half-precision weight is
in its float32 master: products are added to it piece by piece, while a piece is in the CPU's cache. The gradient of an
embedding is as large as the vocabulary, but only the rows of tokens that occur are not zero. If a weight is also used
in another way, that part of its gradient is computed as usual.

Letters: N tokens, I and O inputs and outputs of a layer, V vocabulary, H hidden size.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

PIECE = 2**19
"""Elements of a half-precision product that are added to a float32 sum at a time: 3 MiB with their float32 copy."""

Masters = Mapping[nn.Parameter, Tensor]
"""The float32 master of each half-precision weight."""


@contextmanager
def adding_gradients(model: nn.Module, masters: Masters) -> Iterator[None]:
    """Context in which linear layers and embeddings on a CPU add to their weights' sums of gradients directly.

    Forward and backward pass both belong inside. `torch.autograd.grad` does not see the gradients of these weights.
    """
    forwards = {layer: forward for layer in model.modules() if (forward := _adding_forward(layer, masters)) is not None}
    for layer, forward in forwards.items():
        layer.forward = forward
    try:
        yield
    finally:
        for layer in forwards:
            del layer.forward


def sum_holder(weight: Tensor, masters: Masters) -> Tensor | None:
    """The tensor whose `grad` sums the gradients of a weight: its master or itself; None if nothing may be added
    directly."""
    holder = masters.get(weight, weight) if isinstance(weight, nn.Parameter) else weight
    wide = holder.dtype in (torch.float32, torch.float64)
    return holder if weight.requires_grad and weight.device.type == holder.device.type == "cpu" and wide else None


def add_product(holder_OI: Tensor, grad_NO: Tensor, inputs_NI: Tensor) -> None:
    """Add the gradient of a linear layer's weight to the sum of its holder."""
    if grad_NO.dtype != holder_OI.dtype:
        sum_OI = _sum_of(holder_OI)
        size = max(1, PIECE // holder_OI.shape[1])
        for start in range(0, len(holder_OI), size):
            some = slice(start, start + size)
            sum_OI[some] += (grad_NO[:, some].T @ inputs_NI).to(holder_OI.dtype)
    elif holder_OI.grad is None:
        holder_OI.grad = grad_NO.T @ inputs_NI
    else:
        holder_OI.grad.addmm_(grad_NO.T, inputs_NI)


def add(holder: Tensor, gradient: Tensor) -> None:
    """Add a half-precision gradient to the sum of its holder.

    torch converts element by element when it adds two number formats on a CPU: pieces that are converted first take a
    third of the time.
    """
    if holder.grad is None:
        holder.grad = gradient.to(holder.dtype, memory_format=torch.contiguous_format)
        return
    if gradient.device.type != "cpu" or type(gradient) is not Tensor:
        holder.grad.add_(gradient)
        return
    total, values = holder.grad.view(-1), gradient.reshape(-1)
    for start in range(0, len(values), PIECE):
        total[start : start + PIECE] += values[start : start + PIECE].to(holder.dtype)


def _sum_of(holder: Tensor) -> Tensor:
    if holder.grad is None:
        holder.grad = torch.zeros_like(holder, memory_format=torch.contiguous_format)
    return holder.grad


def _adding_forward(layer: nn.Module, masters: Masters) -> Callable[[Tensor], Tensor] | None:
    """The layer's forward inside the block; None if it stays unchanged."""
    if "forward" in vars(layer):
        return None
    if type(layer) is nn.Linear:
        holder = sum_holder(layer.weight, masters)
        return None if holder is None else partial(_linear, layer, holder)
    if type(layer) is nn.Embedding:
        holder = sum_holder(layer.weight, masters)
        plain = layer.max_norm is None and not layer.scale_grad_by_freq and not layer.sparse
        return partial(_embedding, layer, holder) if plain and holder is not None else None
    return None


def _linear(layer: nn.Linear, holder: Tensor, inputs: Tensor) -> Tensor:
    output: Tensor = _Linear.apply(inputs, layer.weight, layer.bias, holder)  # type: ignore[no-untyped-call]
    return output


def _embedding(layer: nn.Embedding, holder: Tensor, token_ids: Tensor) -> Tensor:
    output: Tensor = _Embedding.apply(token_ids, layer.weight, layer, holder)  # type: ignore[no-untyped-call]
    return output


class _Linear(torch.autograd.Function):
    """`nn.functional.linear`. The weight is an argument: the output has a gradient even if the input has none."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight_OI: Tensor, bias_O: Tensor | None, holder_OI: Tensor) -> Tensor:
        ctx.save_for_backward(inputs, weight_OI)
        ctx.holder = holder_OI
        return nn.functional.linear(inputs, weight_OI, bias_O)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight_OI = ctx.saved_tensors
        grad_NO = grads[0].reshape(-1, len(weight_OI))
        add_product(ctx.holder, grad_NO, inputs.reshape(-1, weight_OI.shape[1]))
        grad_inputs = (grad_NO @ weight_OI).view(inputs.shape) if ctx.needs_input_grad[0] else None
        return grad_inputs, None, grad_NO.sum(dim=0) if ctx.needs_input_grad[2] else None, None


class _Embedding(torch.autograd.Function):
    """`nn.functional.embedding`, whose padding token gets no gradient."""

    @staticmethod
    def forward(ctx: Any, token_ids: Tensor, weight_VH: Tensor, layer: nn.Embedding, holder_VH: Tensor) -> Tensor:
        ctx.save_for_backward(token_ids)
        ctx.padding, ctx.holder = layer.padding_idx, holder_VH
        return nn.functional.embedding(token_ids, weight_VH)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None, None]:
        (token_ids,) = ctx.saved_tensors
        sum_VH, token_ids_N = _sum_of(ctx.holder), token_ids.flatten()
        grad_NH = grads[0].reshape(-1, sum_VH.shape[1]).to(sum_VH.dtype)
        if ctx.padding is not None:
            grad_NH = grad_NH.masked_fill((token_ids_N == ctx.padding)[:, None], 0.0)
        sum_VH.index_add_(0, token_ids_N, grad_NH)
        return None, None, None, None
