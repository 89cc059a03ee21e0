"""Compares attention of a shared prompt by flash operations and log-sums with one masked call over padded rows.

Measures forward and backward of one layer, in turns A B A B in one process. Prints medians, their ratio, and the
largest tensor that each allocates. Usage: python benchmarks/tree_attention.py [--threads 2] [--tries 9] [--dtype
float32]
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlcore.engines.hf.train.tree_attention import Runs, Spans, Tree, attend

CPU = torch.device("cpu")
# prefix lengths, rows per prefix, mean length of a suffix, its spread, query heads, key heads, size of a head
SHAPES = {
    "demo: 8 x 8 rows of 12": (20, 8, 8, 12, 4, 4, 4, 16),
    "short: 2 x 16 rows of 32": (64, 2, 16, 32, 16, 9, 3, 64),
    "long prompt: 1 x 16 rows of 64": (512, 1, 16, 64, 32, 9, 3, 64),
    "equal rows: 1 x 16 rows of 128": (128, 1, 16, 128, 0, 9, 3, 64),
    "long rows: 1 x 8 rows of 512": (256, 1, 8, 512, 200, 9, 3, 64),
    "long rows, 4:1: 1 x 4 rows of 1024": (256, 1, 4, 1024, 400, 8, 2, 128),
}


class LargestTensor(TorchDispatchMode):
    """Records the elements of the largest tensor that an operation in the block makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and measure its result."""
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.elements = max([self.elements, *sizes])
        return result


def main() -> None:
    """Print one line per shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tries", type=int, default=9)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for name, shape in SHAPES.items():
        ways = ways_of(*shape, dtype=getattr(torch, options.dtype))
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        largest = {}
        for way, step in ways.items():
            with LargestTensor() as mode:
                step()
            largest[way] = mode.elements
        for _ in range(options.tries):
            for way, step in ways.items():
                began = time.perf_counter()
                step()
                seconds[way].append(time.perf_counter() - began)
        flash, masked = (statistics.median(seconds[way]) for way in ways)
        print(
            f"{name}: flash {flash * 1e3:.2f} ms, masked {masked * 1e3:.2f} ms, masked / flash {masked / flash:.2f}; "
            f"largest tensor {largest['flash']:,} and {largest['masked']:,} elements"
        )


def ways_of(
    prefix: int,
    groups: int,
    rows: int,
    mean: int,
    spread: int,
    heads: int,
    key_heads: int,
    size: int,
    dtype: torch.dtype,
) -> dict[str, Callable[[], object]]:
    """Forward and backward pass of both methods on the same tensors."""
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    suffixes = [np.sort(rng.integers(mean - spread, mean + spread + 1, rows))[::-1].tolist() for _ in range(groups)]
    flat = [length for group in suffixes for length in group]
    prefixes, num_prefix, total = [prefix] * groups, prefix * groups, prefix * groups + sum(flat)
    own, joint = (*prefixes, *flat), tuple(sum(group) for group in suffixes)
    runs, queries = Runs.neighbours(0, own, CPU), Runs.neighbours(num_prefix, joint, CPU)
    level = Spans(queries, Runs.neighbours(0, prefixes, CPU), causal=False)
    tree = Tree(Spans(runs, runs, causal=True), (level,))
    sizes = [(1, count, total, size) for count in (heads, key_heads, key_heads)]
    inputs = [torch.randn(*shape, dtype=dtype, requires_grad=True) for shape in sizes]
    grad = torch.randn(1, total, heads, size, dtype=dtype).transpose(1, 2)
    places = padded_places(prefixes, suffixes)

    def flash() -> object:
        return torch.autograd.grad(attend(*inputs, tree), inputs, grad)

    def masked() -> object:
        return torch.autograd.grad(attend_masked(*inputs, *places, groups), inputs, grad)

    return {"flash": flash, "masked": masked}


def padded_places(prefixes: list[int], suffixes: list[list[int]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Indices of padded prefixes and suffixes in the packed sequence, the mask of the suffixes, and the inverse."""
    flat, prefix = [length for group in suffixes for length in group], prefixes[0]
    gather_GP = torch.arange(len(prefixes) * prefix).view(-1, prefix)
    starts_B = torch.tensor([gather_GP.numel(), *flat]).cumsum(0)[:-1]
    columns_S = torch.arange(max(flat))
    token_BS = columns_S < torch.tensor(flat)[:, None]
    gather_BS = torch.where(token_BS, starts_B[:, None] + columns_S, 0)
    causal_SS = columns_S[:, None] >= columns_S
    own_BSS = causal_SS & token_BS[:, None] | torch.eye(max(flat), dtype=torch.bool)
    mask_B1SK = pad(own_BSS, (prefix, 0), value=True)[:, None]
    inverse_N = torch.cat([torch.ones(gather_GP.numel(), dtype=torch.bool), token_BS.flatten()]).nonzero()[:, 0]
    return gather_GP, gather_BS, mask_B1SK, inverse_N


def attend_masked(
    query: Tensor, key: Tensor, value: Tensor, gather_GP: Tensor, gather_BS: Tensor, mask_B1SK: Tensor,
    inverse_N: Tensor, groups: int,
) -> Tensor:  # fmt: skip
    """(1, heads, N, size) attention by padded rows, each with a copy of the prefix's keys and values, and a mask."""

    def places(packed: Tensor, gather: Tensor) -> Tensor:
        chosen = torch.index_select(packed[0], 1, gather.flatten())
        return chosen.view(packed.shape[1], *gather.shape, -1).transpose(0, 1)

    query_BS, key_BS, value_BS = (places(tensor, gather_BS) for tensor in (query, key, value))
    query_GP, key_GP, value_GP = (places(tensor, gather_GP) for tensor in (query, key, value))
    group_B = torch.arange(groups).repeat_interleave(len(gather_BS) // groups)
    key_BS = torch.cat([torch.index_select(key_GP, 0, group_B), key_BS], dim=2)
    value_BS = torch.cat([torch.index_select(value_GP, 0, group_B), value_BS], dim=2)
    outputs = [
        scaled_dot_product_attention(query_GP, key_GP, value_GP, is_causal=True, enable_gqa=True),
        scaled_dot_product_attention(query_BS, key_BS, value_BS, attn_mask=mask_B1SK, enable_gqa=True),
    ]
    flat = torch.cat([output.transpose(1, 2).flatten(0, 1) for output in outputs])
    return torch.index_select(flat, 0, inverse_N).transpose(0, 1)[None]


if __name__ == "__main__":
    main()
