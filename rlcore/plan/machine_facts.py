"""Facts about machine and model, known before anything is loaded. Plain frozen data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlcore.contracts.requests import WorkerRequest

from rlcore.contracts.model_files import Answers
from rlcore.contracts.requests import ModelFacts, ModelShape


@dataclass(frozen=True)
class Facts:
    """Facts that the machine or the user declares; the planner looks up nothing by itself."""

    cpus: int = 1
    gpus: int = 0
    memory_bytes: int | None = None
    """Of the host."""
    gpu_memory_bytes: int | None = None
    """Of the smallest device."""
    gpu_free_bytes: int | None = None
    """Of the device with the least memory that other processes have left; None: all of it."""
    gpu_problem: str = ""
    """Reason why this process cannot compute on a device, the end of a sentence; empty: none is known."""
    of_workers: bool = False
    """The devices are those of the workers, also where a cluster starts these on machines that this process does not
    see."""
    parameters: int | None = None
    """Number of parameters of `model.path`; None is unknown and said so."""
    shape: ModelShape | None = None
    """Architecture of `model.path`; None is unknown and said so."""

    answers: Answers = ""
    """Usual length of the answers of `model.path`, by its chat template; empty: unknown."""

    def model_of(self, request: WorkerRequest) -> ModelFacts:
        """Facts about the model of a role."""
        return request.model or ModelFacts(self.parameters, self.shape)

    @property
    def usable_gpu_bytes(self) -> int | None:
        """Memory of a device that a run may take: what is free."""
        return self.gpu_memory_bytes if self.gpu_free_bytes is None else self.gpu_free_bytes

    @property
    def usable_gpu_text(self) -> str:
        """That memory in GiB, with the whole of it where other processes have some."""
        total, free = self.gpu_memory_bytes or 0, self.usable_gpu_bytes or 0
        return f"{free / 2**30:.1f}" + (f" free of {total / 2**30:.1f}" if free < total else "")
