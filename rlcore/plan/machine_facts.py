"""Facts about machine and model, known before anything is loaded. Plain frozen data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlcore.contracts.requests import WorkerRequest

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
    parameters: int | None = None
    """Number of parameters of `model.path`; None is unknown and said so."""
    shape: ModelShape | None = None
    """Architecture of `model.path`; None is unknown and said so."""

    def model_of(self, request: WorkerRequest) -> ModelFacts:
        """Facts about the model of a role."""
        return request.model or ModelFacts(self.parameters, self.shape)
