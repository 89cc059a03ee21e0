"""What is known of machine and model before anything is loaded. Plain frozen data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlcore.plan.types import WorkerRequest


@dataclass(frozen=True)
class ModelShape:
    """The architecture of a decoder, as its config.json tells it."""

    model_type: str
    layers: int
    hidden_size: int
    inner_size: int
    """Of the feed-forward layers."""
    kv_size: int
    """Heads of keys times the size of a head."""
    vocabulary: int
    full_attention: bool
    """Every layer sees all tokens before: no sliding window, no recurrent state, no soft cap in attention."""


@dataclass(frozen=True)
class ModelFacts:
    """What is known of a model before it is loaded."""

    parameters: int | None = None
    """Their number; None: unknown."""
    shape: ModelShape | None = None
    """Its architecture; None: unknown."""


@dataclass(frozen=True)
class Facts:
    """What the machine or the user declares; the planner looks up nothing by itself."""

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
        """What is known of the model of a role."""
        return request.model or ModelFacts(self.parameters, self.shape)
