"""Facts about machine and model that are known before anything is loaded. Plain frozen data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlcore.contracts.requests import WorkerRequest

from rlcore.contracts.model_files import Answers
from rlcore.contracts.requests import ModelFacts, ModelShape

GIB = 2**30


def in_gib(num_bytes: float) -> str:
    """The bytes in GiB, with one digit after the point."""
    return f"{num_bytes / GIB:.1f}"


@dataclass(frozen=True)
class Facts:
    """Facts that the machine or the user declares; the planner looks up nothing itself."""

    cpus: int = 1
    gpus: int = 0
    gpus_per_node: int = 0
    """Devices of a node; 0: as far as is known, all are on one."""
    cpu_bfloat16: str = ""
    """Instructions of the CPU for products of bfloat16 matrices; empty: it has none."""
    memory_bytes: int | None = None
    """Memory of the host, or of the hosts of all nodes together."""
    gpu_memory_bytes: int | None = None
    """Memory of the smallest device."""
    gpu_free_bytes: int | None = None
    """Free memory of the device that has the least of it; None: all of it is free."""
    card: str = ""
    """Name of the devices in the table of `rlcore.plan.machine_cards`; empty: unknown, or several cards."""
    gpu_problem: str = ""
    """Reason why this process cannot compute on a device, worded as the end of a sentence; empty: none is known."""
    compile_problem: str = ""
    """Reason why torch.compile cannot build kernels for a device, worded as the end of a sentence; empty: none is
    known."""
    of_workers: bool = False
    """True if the devices are those of the workers, even where a cluster starts them on machines that this process
    cannot see."""
    parameters: int | None = None
    """Number of parameters of `model.path`; None: unknown, which the plan notes."""
    shape: ModelShape | None = None
    """Architecture of `model.path`; None: unknown, which the plan notes."""

    answers: Answers = ""
    """Usual length of answers of `model.path`, judged by its chat template; empty: unknown."""

    def model_of(self, request: WorkerRequest) -> ModelFacts:
        """Facts about the model of a role."""
        return request.model or ModelFacts(self.parameters, self.shape)

    @property
    def several_nodes(self) -> bool:
        """True if the devices are on more than one node."""
        return 0 < self.gpus_per_node < self.gpus

    @property
    def usable_gpu_bytes(self) -> int | None:
        """Device memory that a run may use: the free part."""
        return self.gpu_memory_bytes if self.gpu_free_bytes is None else self.gpu_free_bytes

    @property
    def usable_gpu_text(self) -> str:
        """That memory in GiB, with the total if other processes use some."""
        total, free = self.gpu_memory_bytes or 0, self.usable_gpu_bytes or 0
        return in_gib(free) + (f" free of {in_gib(total)}" if free < total else "")
