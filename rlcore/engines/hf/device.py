"""Checks a worker's GPU against the build of torch, and sets it up for the run's number format."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from rlcore.errors import ConfigError

if TYPE_CHECKING:
    from rlcore.contracts.workers import WorkerContext

WAYS_OUT = (
    "install a torch that is built for it (https://pytorch.org/get-started/locally lists them), or choose "
    "cluster.device=cpu"
)


def prepare_device(context: WorkerContext) -> None:
    """Check the worker's GPU, and let float32 products use its tensor cores if the configuration says so.

    The latter affects a whole process, so a worker that is a thread of the controller does not change it. ConfigError
    if this torch cannot compute on the GPU.
    """
    check_gpu(context.device)
    config = context.config
    if config.actor.tf32 and config.actor.dtype == "float32" and not config.cluster.in_process:
        torch.set_float32_matmul_precision("high")


def check_gpu(device: str) -> None:
    """ConfigError when this torch is built without CUDA, cannot use the driver, or has no code for the GPU."""
    build, cuda = f"torch {torch.__version__}", torch.version.cuda
    if cuda is None and torch.version.hip is None:
        raise ConfigError(f"cluster.device=cuda: {build} is built without CUDA; {WAYS_OUT}")
    if not torch.cuda.is_available():
        raise ConfigError(
            f"cluster.device=cuda: {build} (CUDA {cuda}) finds no GPU that it can use; needs a driver for that CUDA "
            f"(see nvidia-smi): update it, {WAYS_OUT}"
        )
    capability, built = torch.cuda.get_device_capability(device), torch.cuda.get_arch_list()
    if cuda is not None and built and not _has_code(capability, built):
        major, minor = capability
        raise ConfigError(
            f"cluster.device=cuda: {torch.cuda.get_device_name(device)} is sm_{major}{minor}, and {build} has code for "
            f"{', '.join(built)} only; {WAYS_OUT}"
        )


def _has_code(capability: tuple[int, int], built: Sequence[str]) -> bool:
    """True if a build for these architectures runs on a GPU: machine code of its generation (`sm_80` on 8.6), or code
    for an older one that the driver compiles (`compute_90`)."""
    for name in built:
        found = re.fullmatch(r"(sm|compute)_(\d+)(\d)[af]?", name)
        if not found:
            continue
        major, minor = int(found[2]), int(found[3])
        if found[1] == "compute" and (major, minor) <= capability:
            return True
        if major == capability[0] and minor <= capability[1]:
            return True
    return False
