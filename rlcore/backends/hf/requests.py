"""Resources that this backend's classes need for a request; a pure function each, which imports no torch."""

from dataclasses import replace

from rlcore.actor import ACTOR
from rlcore.config import RunConfig
from rlcore.plan import WorkerRequest
from rlcore.plan.memory import frozen_bytes_per_parameter

BASE_NOTE = "the actor's weights with the LoRA adapter off serve as the reference; no second model is loaded"


def complete_reference(config: RunConfig, request: WorkerRequest) -> WorkerRequest:
    """The actor's base where that has a LoRA adapter; else a second model with the actor's ranks and sharding.

    A `reference.path` asks for a second model in any case.
    """
    actor = config.actor
    if actor.lora.enabled and not config.reference.path and actor.backend == request.backend:
        return replace(request, inside=ACTOR, engine=actor, bytes_per_parameter=0.0, note=BASE_NOTE)
    held = frozen_bytes_per_parameter(actor) if request.bytes_per_parameter else 0.0
    return replace(request, ranks=actor.ranks, bytes_per_parameter=held)
