"""Memory of ranks that share a model out, by phase, and what ranks keep in host memory.

Between steps a rank has its part of weights, masters and moments. Layers are gathered one after the other for passes.
What is in no layer, embeddings and head, is gathered for as long as a pass takes, and counts twice: torch copies what
it gathers. Held against measurements of docs/results/sharding.md.
"""

from rlcore.config import EngineConfig
from rlcore.contracts.clusters import WorkerPlan
from rlcore.contracts.requests import ModelFacts
from rlcore.plan.activations import BYTES, HALF
from rlcore.plan.memory import GRADIENT_BYTES, TRAINING_BYTES
from rlcore.plan.run_plan import RunPlan

FORWARD_LAYERS, BACKWARD_LAYERS = 2, 4
"""Layers that are there at a time: one computes, the next is on its way; backward their gradients, too."""
MOMENT_BYTES = {"float64": 16.0, "float32": 8.0, "bfloat16": 12.0, "float16": 12.0}
"""Of a parameter: the optimizer's state, half precision's masters included."""


def sharded_bytes(engine: EngineConfig, model: ModelFacts) -> dict[str, int]:
    """Bytes of one rank by phase, without activations and context; of LoRA the frozen weights alone."""
    shape, parameters, ranks = model.shape, model.parameters or 0, engine.shard_ranks
    size = BYTES[engine.dtype]
    outside, layer = 0, parameters
    if shape is not None:
        outside = min(parameters, 2 * shape.vocabulary * shape.hidden_size)
        layer = (parameters - outside) // max(1, shape.layers)
    trained = size if engine.lora.enabled else TRAINING_BYTES[engine.dtype]
    kept = size if engine.lora.enabled else trained - GRADIENT_BYTES[engine.dtype]
    masters = BYTES["float32"] if engine.dtype in HALF and not engine.lora.enabled else 0
    held = int(kept * parameters / ranks)
    forward = size * (2 * outside + FORWARD_LAYERS * layer)
    largest = size * max(outside, layer)
    return {
        "start": int((size + masters) * parameters / ranks) + forward,
        "sample": held,
        "score": held + forward,
        "update": int(trained * parameters / ranks) + size * (2 * outside + BACKWARD_LAYERS * layer),
        "hand-over": held + largest,
        "save": held + largest,
    }


def host_bytes(plan: RunPlan, worker: WorkerPlan) -> dict[str, int]:
    """Bytes of host memory that all ranks of a role that trains need on GPUs, by purpose; those that need any.

    offload: what rests there; hand-over: the first rank's copy of the weights, of sharded ones in files that of a unit;
    save: what is copied to be written.
    """
    engine, request = worker.request.engine, worker.request
    parameters = plan.facts.model_of(request).parameters or 0
    if engine is None or not request.gpus or engine.lora.enabled:
        return {}
    weights, state = BYTES[engine.dtype] * parameters, int(MOMENT_BYTES[engine.dtype] * parameters)
    sharded = engine.shard_ranks > 1
    unit = largest_unit(engine, plan.facts.model_of(request)) if sharded else weights
    sent = unit if plan.weights_kind == "directory" else weights
    found = {
        "offload": (weights + state) * request.ranks if engine.offload else 0,
        "hand-over": sent if request.role.name == "actor" and plan.weights_kind else 0,
        "save": state + min(weights, unit * request.ranks),
    }
    return {purpose: size for purpose, size in found.items() if size}


def largest_unit(engine: EngineConfig, model: ModelFacts) -> int:
    """Bytes of the largest part of the weights that is gathered at a time."""
    phases = sharded_bytes(engine, model)
    return phases["save"] - phases["sample"]
