"""Products of bfloat16 matrices on CPUs that multiply them natively, with float32 results.

Such a CPU sums a product in float32 and rounds the sum. Two products of bfloat16 take a third to a half of the time of
one in float32.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from rlcore.plan.cpu_products import bfloat16_instructions


def multiplies_half(tensor: Tensor) -> bool:
    """True for a bfloat16 tensor on a CPU with instructions for its products."""
    return tensor.dtype == torch.bfloat16 and tensor.device.type == "cpu" and bool(bfloat16_instructions())


def write_wide(product: Callable[[Tensor | None], Tensor], out: Tensor) -> None:
    """Write a product into a float32 tensor, as exact as 16 bits of a number allow.

    `product`: the bfloat16 product plus a summand, which it adds before it rounds. So it also gives the rounding error:
    the product minus its rounded value.
    """
    rounded = product(None)
    error = product(rounded.neg())
    out.copy_(rounded)
    out += error.float()
