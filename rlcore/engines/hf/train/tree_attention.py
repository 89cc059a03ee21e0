"""Attention of a packed token tree, without a mask, padding or a copy of a prefix for each of its rows.

Letters: N tokens of the packed sequence, H heads of queries, K heads of keys, D size of a head.

Every run of tokens attends to itself, causally, and to all of each run above it. A softmax over several sets of keys is
the mean of their softmaxes, weighted by the exponentials of their log-sums. The flash kernels compute the gradients of
each part from the joint output and the joint log-sums: their probabilities are exp(score - log-sum), and the output
enters only by its product with its gradient. So only queries, keys, values, joint output and joint log-sums are kept
for the backward pass, which is linear in N for any number of levels.
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
class Runs:
    """Runs of tokens of the packed sequence, in order; none of them is empty, and no two overlap."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    device: torch.device

    @classmethod
    def neighbours(cls, start: int, lengths: Sequence[int], device: torch.device) -> "Runs":
        """Runs from `start` on that follow each other without a gap."""
        return cls(tuple(accumulate(lengths[:-1], initial=start)) if lengths else (), tuple(lengths), device)

    def of(self, packed: Tensor, dim: int = 2) -> Tensor:
        """The tokens of the runs: a view if the runs are contiguous, else a copy."""
        if self._has_gaps:
            return packed.index_select(dim, self._places)
        return packed.narrow(dim, self.starts[0], sum(self.lengths))

    def put_back(self, packed: Tensor, changed: Tensor) -> None:
        """Write the result of `of`, after in-place changes, into the packed tensor."""
        if self._has_gaps:
            packed.index_copy_(2, self._places, changed)

    def add(self, packed: Tensor, summand: Tensor) -> None:
        """Add to the tokens of the runs."""
        if self._has_gaps:
            packed.index_add_(2, self._places, summand.to(packed.dtype))
        else:
            self.of(packed).add_(summand)

    @cached_property
    def bounds(self) -> Tensor:
        """(runs + 1,) int32: start of each run as if there were no gaps, and end of the last one."""
        return device_tensor(np.array([0, *accumulate(self.lengths)], dtype=np.int32), self.device)

    @cached_property
    def _has_gaps(self) -> bool:
        return sum(self.lengths) != self.starts[-1] + self.lengths[-1] - self.starts[0]

    @cached_property
    def _places(self) -> Tensor:
        """Place of each token in the packed sequence."""
        skipped = np.array(self.starts) - np.cumsum((0, *self.lengths[:-1]))
        places = np.repeat(skipped, self.lengths) + np.arange(sum(self.lengths))
        return device_tensor(places.astype(np.int64), self.device)


@dataclass(frozen=True, eq=False)
class Spans:
    """Runs of queries, and for each the run of keys that all of its queries see."""

    queries: Runs
    keys: Runs
    causal: bool
    """True if a query sees no key after its index in the run; both lengths are then equal."""

    @cached_property
    def alike(self) -> tuple[tuple[int, int, int], ...]:
        """(number, queries of each, keys of each) of runs with the same lengths that follow each other."""
        runs = zip(self.queries.lengths, self.keys.lengths, strict=True)
        return tuple((len(list(same)), *lengths) for lengths, same in groupby(runs))


@dataclass(frozen=True, eq=False)
class Tree:
    """The keys that each token of a packed sequence attends to."""

    own: Spans
    """Every run of the tree sees itself; these are all tokens of the sequence, without a gap."""
    levels: tuple[Spans, ...] = ()
    """The tokens below each run of a level see all of it, from the uppermost level on."""
    longest: int = 0
    """Tokens on the longest way down the tree; 0: unknown."""

    def attend(self, query_1HND: Tensor, key_1KND: Tensor, value_1KND: Tensor, scale: float | None) -> Tensor:
        """Computes what the function `attend` does."""
        return attend(query_1HND, key_1KND, value_1KND, self, scale)


@dataclass(frozen=True, eq=False)
class Part:
    """Queries, keys and values of spans, and the result of their softmax, which may cover more keys."""

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
        """Gradients of queries, keys and values, in their number format or in float32."""
        ...


HALF_FROM = 512
"""Tokens from which the CPU's backward operation is as fast in bfloat16 as in float32; 64 take six times as long."""


class LoopedFlash:
    """The CPU's flash operations, called once for neighbouring runs with the same lengths.

    Gradients of half precision are computed in float32 where that is faster: in float16, and for short runs.
    """

    def forward(
        self, query_1HND: Tensor, key_1KND: Tensor, value_1KND: Tensor, spans: Spans, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Computes what `FlashKernel.forward` does."""
        inputs = _runs(query_1HND, spans, 1), _runs(key_1KND, spans, 2), _runs(value_1KND, spans, 2)
        results = [
            aten._scaled_dot_product_flash_attention_for_cpu(*run, 0.0, spans.causal, scale=scale)
            for run in zip(*inputs, strict=True)
        ]
        outputs, log_sums = zip(*results, strict=True)
        return _packed(outputs), _packed(log_sums)

    def backward(self, grad_1HND: Tensor, part: Part, spans: Spans, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """Computes what `FlashKernel.backward` does."""
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
            for run in map(_in_fast_format, *inputs)
        ]
        grad_query, grad_key, grad_value = (_packed(gradients) for gradients in zip(*results, strict=True))
        return grad_query, grad_key, grad_value


def _in_fast_format(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, log_sums: Tensor
) -> tuple[Tensor, ...]:
    """The inputs of the CPU's backward operation in the number format in which it is faster."""
    tensors = grad, query, key, value, output
    lengths = query.shape[-2], key.shape[-2]
    if query.dtype == torch.float16 or (query.dtype == torch.bfloat16 and min(lengths) < HALF_FROM):
        return *(tensor.float() for tensor in tensors), log_sums
    return *tensors, log_sums


class VariableLengthFlash:
    """The variable-length flash operations of CUDA, one call for all spans. They take half precision only."""

    def forward(
        self, query_1HND: Tensor, key_1KND: Tensor, value_1KND: Tensor, spans: Spans, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Computes what `FlashKernel.forward` does."""
        inputs = [tensor[0].transpose(0, 1) for tensor in (query_1HND, key_1KND, value_1KND)]
        output_NHD, log_sums_HN, *_ = aten._flash_attention_forward(
            *inputs, *_bounds(spans), 0.0, spans.causal, False, scale=scale
        )
        return output_NHD.transpose(0, 1)[None], log_sums_HN[None]

    def backward(self, grad_1HND: Tensor, part: Part, spans: Spans, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """Computes what `FlashKernel.backward` does."""
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
        kernel = KERNELS[query_1HND.device.type]
        output_1HND, log_sums_1HN = kernel.forward(query_1HND, key_1KND, value_1KND, tree.own, scale)
        for level in tree.levels:
            queries, keys = level.queries, level.keys
            others = kernel.forward(queries.of(query_1HND), keys.of(key_1KND), keys.of(value_1KND), level, scale)
            joint = queries.of(output_1HND), queries.of(log_sums_1HN)
            _join(*joint, *others)
            queries.put_back(output_1HND, joint[0])
            queries.put_back(log_sums_1HN, joint[1])
        ctx.save_for_backward(query_1HND, key_1KND, value_1KND, output_1HND, log_sums_1HN)
        ctx.tree, ctx.scale = tree, scale
        return output_1HND

    @staticmethod
    def backward(ctx: Any, grad_1HND: Tensor) -> Any:
        tree, scale, whole = ctx.tree, ctx.scale, Part(*ctx.saved_tensors)
        grad_1HND = _dense(grad_1HND)
        kernel = KERNELS[grad_1HND.device.type]
        grad_query, grad_key, grad_value = kernel.backward(grad_1HND, whole, tree.own, scale)
        for level in tree.levels:
            queries, keys = level.queries, level.keys
            part = Part(
                queries.of(whole.query_1HND),
                keys.of(whole.key_1KND),
                keys.of(whole.value_1KND),
                queries.of(whole.output_1HND),
                queries.of(whole.log_sums_1HN),
            )
            of_query, of_key, of_value = kernel.backward(queries.of(grad_1HND), part, level, scale)
            queries.add(grad_query, of_query)
            keys.add(grad_key, of_key)
            keys.add(grad_value, of_value)
        dtype = grad_1HND.dtype
        return grad_query.to(dtype), grad_key.to(dtype), grad_value.to(dtype), None, None


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
    if not tree.own.queries.lengths:  # the CPU's flash operation divides by the number of queries
        return query_1HND
    scale = query_1HND.shape[-1] ** -0.5 if scale is None else scale
    inputs = _dense(query_1HND), _dense(key_1KND), _dense(value_1KND)
    output_1HND: Tensor = _TreeAttention.apply(*inputs, tree, scale)  # type: ignore[no-untyped-call]
    return output_1HND


def _dense(tensor: Tensor) -> Tensor:
    """The tensor with each head's numbers contiguous in memory, because the kernels ignore that stride."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _join(output_1HND: Tensor, log_sums_1HN: Tensor, other_1HND: Tensor, other_1HN: Tensor) -> None:
    """Merge the second output and its log-sums into the first, in place: a softmax over the keys of both."""
    share_1HN1 = torch.sigmoid(other_1HN - log_sums_1HN)[..., None]
    wide = share_1HN1.dtype
    output_1HND.copy_(torch.lerp(output_1HND.to(wide), other_1HND.to(wide), share_1HN1))
    log_sums_1HN.copy_(torch.logaddexp(log_sums_1HN, other_1HN))


def _bounds(spans: Spans) -> tuple[Tensor, Tensor, int, int]:
    queries, keys = spans.queries, spans.keys
    return queries.bounds, keys.bounds, max(queries.lengths), max(keys.lengths)


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
