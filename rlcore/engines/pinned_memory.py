"""Pinned host memory without the rounding that doubles some tensors."""

import os

ROUNDED_MIB = 1
"""Tensors below this size are rounded: they are few bytes in all."""
_SETTING = "pinned_max_round_threshold_mb"
_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""torch reads the first one that is set."""


def pin_exactly() -> None:
    """Let torch allocate pinned memory in the size of the tensor; to be called before torch reads its environment.

    By default it rounds up to a power of two: a 7B model's offloaded state would take 1.9 times its size.
    """
    name = next((name for name in _VARIABLES if name in os.environ), _VARIABLES[-1])  # also if it is empty
    settings = [part for part in os.environ.get(name, "").split(",") if part]
    if not any(part.partition(":")[0].strip() == _SETTING for part in settings):
        os.environ[name] = ",".join([*settings, f"{_SETTING}:{ROUNDED_MIB}"])
