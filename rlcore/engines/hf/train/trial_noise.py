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


def difference_and_bound(
    transformer: nn.Module, difference_N: Tensor, tolerance: float, noise: Callable[[], Tensor]
) -> tuple[float, float]:
    """(difference of two ways to compute, its bound): the largest of all tokens, and `tolerance`.

    With routers in half precision the median, and at least `TIMES_NOISE` times the median that random roundings cause.
    `difference_N`: of each token. `noise`: its (N,) differences if the same is computed in the same way once more.
    """
    if next(transformer.parameters()).dtype not in HALF or not has_routers(transformer):
        return float(difference_N.max()), tolerance
    with rounding_again(transformer):
        noise_N = noise()
    return float(difference_N.median()), max(tolerance, TIMES_NOISE * float(noise_N.median()))


def has_routers(transformer: Any) -> bool:
    """True if the model chooses experts for each token."""
    return bool(getattr(transformer.config.get_text_config(), "num_experts_per_tok", 0))


@contextmanager
def rounding_again(transformer: nn.Module) -> Iterator[None]:
    """Context in which each layer's output is rounded once more: every number changes at random by up to a unit in the
    last place. Every context has the same random numbers."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    generator = torch.Generator().manual_seed(0)

    def round_again(layer: nn.Module, inputs: Any, output: Any) -> Any:
        states = output[0] if isinstance(output, tuple) else output
        parts = torch.rand(states.shape, generator=generator).to(states.device) - 0.5
        rounded = (states.float() * (1 + parts * torch.finfo(states.dtype).eps)).to(states.dtype)
        return (rounded, *output[1:]) if isinstance(output, tuple) else rounded

    layers = [layer for layer in transformer.modules() if isinstance(layer, GradientCheckpointingLayer)]
    hooks = [layer.register_forward_hook(round_again) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
