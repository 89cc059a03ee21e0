"""The bound of a trial, which computes the same in two ways, in half precision and with experts.

Where routers choose experts, one rounding may choose other ones, and the results of a token differ by as much as those
of two models. So the trial of such a model compares medians, and its bound follows from what roundings alone do.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rlcore.engines.hf.train.rounding import HALF

TIMES_NOISE = 2.0
"""Bound of a difference, as a multiple of what roundings alone change."""
NUM_NOISES = 3
"""Number of times that this is measured; the largest counts."""


def difference_and_bound(
    transformer: nn.Module, difference_N: Tensor, tolerance: float, noise: Callable[[], Tensor]
) -> tuple[float, float]:
    """(difference of two ways to compute, its bound).

    `difference_N`: of each token; the largest counts, and `tolerance` bounds it. With routers in half precision the
    median counts. Its bound is then `TIMES_NOISE` times the largest of `tolerance` and of medians of `noise`, which
    computes the first way once more and returns its (N,) differences from the first time.
    """
    if next(transformer.parameters()).dtype not in HALF or not has_routers(transformer):
        return float(difference_N.max()), tolerance
    medians = []
    for seed in range(NUM_NOISES):
        with rounding_again(transformer, seed):
            medians.append(float(noise().median()))
    return float(difference_N.median()), TIMES_NOISE * max(tolerance, *medians)


def has_routers(transformer: Any) -> bool:
    """True if the model chooses experts for each token."""
    return bool(getattr(transformer.config.get_text_config(), "num_experts_per_tok", 0))


@contextmanager
def rounding_again(transformer: nn.Module, seed: int = 0) -> Iterator[None]:
    """Context in which the outputs of each layer and of its parts, such as its attention, are rounded once more: every
    number changes at random by up to a unit in the last place. Contexts of a seed have the same random numbers."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    generator = torch.Generator().manual_seed(seed)

    def round_again(module: nn.Module, inputs: Any, output: Any) -> Any:
        states = output[0] if isinstance(output, tuple) else output
        if not isinstance(states, Tensor) or not states.is_floating_point():
            return output
        shares = torch.rand(states.shape, generator=generator).to(states.device) - 0.5
        rounded = (states.float() * (1 + shares * torch.finfo(states.dtype).eps)).to(states.dtype)
        return (rounded, *output[1:]) if isinstance(output, tuple) else rounded

    layers = [layer for layer in transformer.modules() if isinstance(layer, GradientCheckpointingLayer)]
    parts = [part for layer in layers for part in layer.children()]
    hooks = [module.register_forward_hook(round_again) for module in (*layers, *parts)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
