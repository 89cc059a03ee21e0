"""Copies arrays of a batch to the compute device."""

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


def device_tensor(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """The array as a tensor of the same shape and type, in memory that nothing else uses.

    A copy to CUDA starts in page-locked memory and does not wait: computations that use it are queued after it.
    """
    if device.type != "cuda":
        return torch.tensor(array, device=device)
    return torch.tensor(array).pin_memory().to(device, non_blocking=True)
