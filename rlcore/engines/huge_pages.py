"""Huge pages for the large tensors of a process that computes on a CPU."""

import os

VARIABLE = "THP_MEM_ALLOC_ENABLE"
"""Read by torch when it allocates its first tensor: tensors of 2 MiB and more are then aligned to huge pages, which it
asks the kernel for."""


def use_huge_pages() -> None:
    """Let torch ask for huge pages; to be called before its first tensor. The variable is kept if it is set.

    In pages of 4 KiB, an update of a small model has the kernel map and clear a few hundred thousand of them.
    """
    os.environ.setdefault(VARIABLE, "1")
