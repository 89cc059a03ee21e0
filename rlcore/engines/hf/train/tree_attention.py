"""Attention of a packed sequence of prefixes and suffixes, without a mask, padding or a copy of a prefix.

Letters: N tokens of the packed sequence, H heads of queries, K heads of keys, D size of a head.

Every piece of the sequence, prefix or suffix, attends to itself, causally. The suffixes of a group attend to the prefix
of the group, and see all of it. A softmax over both sets of keys is the mean of the two, weighed with the exponentials
of their log-sums. The flash kernels compute the gradients of each part from the joint output and the joint log-sums:
their probabilities are exp(score - log-sum), and the output enters only by its product with its gradient. So queries,
keys, values, joint output and joint log-sums are all that is kept for the backward pass, and that is linear in N.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from rlcore.engines.hf.train.transfers import device_tensor

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class Spans:
    """Neighbouring runs of queries, and the run of keys that each of them sees; none of them is empty.

    Runs follow each other without a gap, from `first_query` and `first_key` of the packed sequence on.
    """

    first_query: int
    query_lengths: tuple[int, ...]
    first_key: int
    key_lengths: tuple[int, ...]
    causal: bool
    """A query sees no key after its place in the run; the two lengths are then alike."""
    device: torch.device

    def queries(self, tensor: Tensor, dim: int = 2) -> Tensor:
        """The part of a packed tensor that belongs to the queries."""
        return tensor.narrow(dim, self.first_query, sum(self.query_lengths))

    def keys(self, tensor_1KND: Tensor) -> Tensor:
        """The part of packed keys or values that belongs to the keys."""
        return tensor_1KND.narrow(2, self.first_key, sum(self.key_lengths))

    @cached_property
    def alike(self) -> tuple[tuple[int, int, int], ...]:
        """(number, queries of each, keys of each) of neighbouring runs with the same lengths."""
        runs = zip(self.query_lengths, self.key_lengths, strict=True)
        return tuple((len(list(same)), *lengths) for lengths, same in groupby(runs))

    @cached_property
    def query_bounds(self) -> Tensor:
        """(runs + 1,) int32: where each run of queries begins, and where the last one ends."""
        return self._bounds(self.query_lengths)

    @cached_property
    def key_bounds(self) -> Tensor:
        """(runs + 1,) int32: as `query_bounds`, of the keys."""
        return self._bounds(self.key_lengths)

    def _bounds(self, lengths: tuple[int, ...]) -> Tensor:
        return device_tensor(np.array([0, *accumulate(lengths)], dtype=np.int32), self.device)


@dataclass(frozen=True, eq=False)
class Tree:
    """The keys that each token of a packed sequence attends to."""

    own: Spans
    """Every prefix and every suffix sees itself; these are all tokens of the sequence."""
    shared: Spans
    """The suffixes of a group see its prefix; without runs where no group has both."""

    @property
    def spans(self) -> tuple[Spans, Spans]:
        """Both."""
        return self.own, self.shared


@dataclass(frozen=True, eq=False)
class Part:
    """Queries, keys and values of spans, and what their softmax gave; that may be one over more keys."""

    query_1HND: Tensor
    key_1KND: Tensor
    value_1KND: Tensor
    output_1HND: Tensor
    log_sums_1HN: Tensor


class FlashKernel(Protocol):
    """Attention of spans, with log-sums. Tensors hold the tokens of the spans' queries, or of their keys, only."""

    def forward(
        self, query_1HND: Tensor, key_1KND: Tensor, value_1KND: Tensor, spans: Spans, scale: float
    ) -> tuple[Tensor, Tensor]:
        """(1, H, N, D) output, and (1, H, N) log-sums of the scaled scores, in float32 at least."""
        ...

    def backward(self, grad_1HND: Tensor, part: Part, spans: Spans, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of queries, keys and values."""
        ...


class LoopedFlash:
    """The CPU's flash operations, called once for neighbouring runs with the same lengths."""

    def forward(
        self, query_1HND: Tensor, key_1KND: Tensor, value_1KND: Tensor, spans: Spans, scale: float
    ) -> tuple[Tensor, Tensor]:
        """As `FlashKernel.forward`."""
        inputs = _runs(query_1HND, spans, 1), _runs(key_1KND, spans, 2), _runs(value_1KND, spans, 2)
        results = [
            aten._scaled_dot_product_flash_attention_for_cpu(*run, 0.0, spans.causal, scale=scale)
            for run in zip(*inputs, strict=True)
        ]
        outputs, log_sums = zip(*results, strict=True)
        return _packed(outputs), _packed(log_sums)

    def backward(self, grad_1HND: Tensor, part: Part, spans: Spans, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """As `FlashKernel.backward`."""
        inputs = (
            _runs(grad_1HND, spans, 1),
            _runs(part.query_1HND, spans, 1),
            _runs(part.key_1KND, spans, 2),
            _runs(part.value_1KND, spans, 2),
            _runs(part.output_1HND, spans, 1),
            _runs(part.log_sums_1HN, spans, 1),
        )
        results = [
            aten._scaled_dot_product_flash_attention_for_cpu_backward(*run, 0.0, spans.causal, scale=scale)
            for run in zip(*inputs, strict=True)
        ]
        grad_query, grad_key, grad_value = (_packed(gradients) for gradients in zip(*results, strict=True))
        return grad_query, grad_key, grad_value


class VariableLengthFlash:
    """The variable-length flash operations of CUDA, one call for all spans. They take half precision only."""

    def forward(
        self, query_1HND: Tensor, key_1KND: Tensor, value_1KND: Tensor, spans: Spans, scale: float
    ) -> tuple[Tensor, Tensor]:
        """As `FlashKernel.forward`."""
        inputs = [tensor[0].transpose(0, 1) for tensor in (query_1HND, key_1KND, value_1KND)]
        output_NHD, log_sums_HN, *_ = aten._flash_attention_forward(
            *inputs, *_bounds(spans), 0.0, spans.causal, False, scale=scale
        )
        return output_NHD.transpose(0, 1)[None], log_sums_HN[None]

    def backward(self, grad_1HND: Tensor, part: Part, spans: Spans, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """As `FlashKernel.backward`."""
        tensors = grad_1HND, part.query_1HND, part.key_1KND, part.value_1KND, part.output_1HND
        inputs = [tensor[0].transpose(0, 1) for tensor in tensors]
        no_dropout = grad_1HND.new_zeros(2, dtype=torch.uint64), grad_1HND.new_empty(0)
        gradients = aten._flash_attention_backward(
            *inputs,
            part.log_sums_1HN[0].contiguous(),
            *_bounds(spans),
            0.0,
            spans.causal,
            *no_dropout,
            scale=scale,
        )
        grad_query, grad_key, grad_value = (gradient.transpose(0, 1)[None] for gradient in gradients)
        return grad_query, grad_key, grad_value


KERNELS: dict[str, FlashKernel] = {"cpu": LoopedFlash(), "cuda": VariableLengthFlash()}
"""By type of device."""


class _TreeAttention(torch.autograd.Function):
    """(1, H, N, D) attention of a packed sequence."""

    @staticmethod
    def forward(ctx: Any, query_1HND: Tensor, key_1KND: Tensor, value_1KND: Tensor, tree: Tree, scale: float) -> Tensor:
        kernel, shared = KERNELS[query_1HND.device.type], tree.shared
        output_1HND, log_sums_1HN = kernel.forward(query_1HND, key_1KND, value_1KND, tree.own, scale)
        if shared.query_lengths:
            inputs = shared.queries(query_1HND), shared.keys(key_1KND), shared.keys(value_1KND)
            others = kernel.forward(*inputs, shared, scale)
            _join(shared.queries(output_1HND), shared.queries(log_sums_1HN), *others)
        ctx.save_for_backward(query_1HND, key_1KND, value_1KND, output_1HND, log_sums_1HN)
        ctx.tree, ctx.scale = tree, scale
        return output_1HND

    @staticmethod
    def backward(ctx: Any, grad_1HND: Tensor) -> Any:
        tree, scale, whole = ctx.tree, ctx.scale, Part(*ctx.saved_tensors)
        grad_1HND = _dense(grad_1HND)
        kernel, shared = KERNELS[grad_1HND.device.type], tree.shared
        grad_query, grad_key, grad_value = kernel.backward(grad_1HND, whole, tree.own, scale)
        if shared.query_lengths:
            part = Part(
                shared.queries(whole.query_1HND),
                shared.keys(whole.key_1KND),
                shared.keys(whole.value_1KND),
                shared.queries(whole.output_1HND),
                shared.queries(whole.log_sums_1HN),
            )
            of_query, of_key, of_value = kernel.backward(shared.queries(grad_1HND), part, shared, scale)
            shared.queries(grad_query).add_(of_query)
            shared.keys(grad_key).add_(of_key)
            shared.keys(grad_value).add_(of_value)
        return grad_query, grad_key, grad_value, None, None


def attend(query_1HND: Tensor, key_1KND: Tensor, value_1KND: Tensor, tree: Tree, scale: float | None = None) -> Tensor:
    """(1, H, N, D) attention of a packed sequence, where every H / K heads of queries have one of keys.

    `scale`: of the scores; None: 1 / sqrt(D). ValueError for values with another size than keys, and on a device that
    has no kernel for it.
    """
    if value_1KND.shape != key_1KND.shape:
        raise ValueError(f"its values have the shape {tuple(value_1KND.shape)} and its keys {tuple(key_1KND.shape)}")
    if query_1HND.device.type not in KERNELS:
        raise ValueError(
            f"found the device '{query_1HND.device.type}'; flash attention needs one of: {', '.join(KERNELS)}"
        )
    if not tree.own.query_lengths:  # a flash operation of the CPU divides by the number of queries
        return query_1HND
    scale = query_1HND.shape[-1] ** -0.5 if scale is None else scale
    inputs = _dense(query_1HND), _dense(key_1KND), _dense(value_1KND)
    output_1HND: Tensor = _TreeAttention.apply(*inputs, tree, scale)  # type: ignore[no-untyped-call]
    return output_1HND


def _dense(tensor: Tensor) -> Tensor:
    """The tensor with the numbers of a head side by side in memory: the kernels do not look at that stride."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _join(output_1HND: Tensor, log_sums_1HN: Tensor, other_1HND: Tensor, other_1HN: Tensor) -> None:
    """Turn the first output and its log-sums, in place, into those of a softmax over the keys of both."""
    share_1HN1 = torch.sigmoid(other_1HN - log_sums_1HN)[..., None]
    wide = share_1HN1.dtype
    output_1HND.copy_(torch.lerp(output_1HND.to(wide), other_1HND.to(wide), share_1HN1))
    log_sums_1HN.copy_(torch.logaddexp(log_sums_1HN, other_1HN))


def _bounds(spans: Spans) -> tuple[Tensor, Tensor, int, int]:
    return spans.query_bounds, spans.key_bounds, max(spans.query_lengths), max(spans.key_lengths)


def _runs(packed: Tensor, spans: Spans, lengths: int) -> list[Tensor]:
    """Views of the spans' (1, heads, tokens, ...) as (number, heads, tokens of each, ...), one for each of `alike`."""
    pieces = torch.split(packed, [run[0] * run[lengths] for run in spans.alike], dim=2)
    return [
        piece if run[0] == 1 else torch.unflatten(piece[0], 1, (run[0], -1)).transpose(0, 1)
        for run, piece in zip(spans.alike, pieces, strict=True)
    ]


def _packed(runs: Sequence[Tensor]) -> Tensor:
    """The inverse of `_runs`, as one tensor, in which the heads of a token are neighbours, as kernels leave them."""
    pieces = [run.transpose(1, 2) for run in runs]
    pieces = [piece if len(piece) == 1 else piece.flatten(0, 1)[None] for piece in pieces]
    return torch.cat(pieces, dim=1).transpose(1, 2)
