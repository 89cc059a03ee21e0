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
    shape, parameters, ranks = model.shape, model.parameters or 0, engine.data_parallel
    size = BYTES[engine.dtype]
    outside, layer = 0, parameters
    if shape is not None:
        outside = min(parameters, 2 * shape.vocabulary * shape.hidden_size)
        layer = (parameters - outside) // max(1, shape.layers)
    trained = size if engine.lora.enabled else TRAINING_BYTES[engine.dtype]
    kept = size if engine.lora.enabled else trained - GRADIENT_BYTES[engine.dtype]
    masters = BYTES["float32"] if engine.dtype in HALF and not engine.lora.enabled else 0
    if engine.offload and not engine.lora.enabled:
        return _offloaded_bytes(engine, parameters / ranks, outside, layer)
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


def _offloaded_bytes(engine: EngineConfig, share: float, outside: int, layer: int) -> dict[str, int]:
    """The same of a rank whose weights and optimizer state rest on the host; `share`: its number of parameters.

    State is there in the optimizer's step only, when nothing is gathered.
    """
    size, gradients = BYTES[engine.dtype], GRADIENT_BYTES[engine.dtype]
    held, state = int(size * share), int(MOMENT_BYTES[engine.dtype] * share)
    masters = BYTES["float32"] if engine.dtype in HALF else 0
    forward, largest = size * (2 * outside + FORWARD_LAYERS * layer), size * max(outside, layer)
    backward = size * (2 * outside + BACKWARD_LAYERS * layer)
    return {
        "start": held + int(masters * share) + forward,
        "sample": 0,
        "score": held + forward,
        "update": held + int(gradients * share) + max(backward, state),
        "hand-over": held + largest,
        "save": held + largest,
    }


def host_bytes(plan: RunPlan, worker: WorkerPlan) -> dict[str, int]:
    """Bytes of host memory that all ranks of a role that trains need on GPUs, by purpose; those that need any.

    offload: what rests there; hand-over: the first rank's copy of the weights; save: what is
    copied to be written, all of it where training goes on meanwhile.
    """
    engine, request = worker.request.engine, worker.request
    parameters = plan.facts.model_of(request).parameters or 0
    if engine is None or not request.gpus or engine.lora.enabled:
        return {}
    weights, state = BYTES[engine.dtype] * parameters, int(MOMENT_BYTES[engine.dtype] * parameters)
    sharded = engine.sharding != "none" and engine.data_parallel > 1
    found = {
        "offload": (weights + state) * (1 if sharded else request.ranks) if engine.offload else 0,
        "hand-over": weights if request.role.name == "actor" and plan.weights_kind else 0,
        "save": state + min(weights, largest_unit(engine, plan.facts.model_of(request)) * request.ranks)
        if sharded and not plan.saves_copies
        else state + weights,
    }
    return {purpose: size for purpose, size in found.items() if size}


def largest_unit(engine: EngineConfig, model: ModelFacts) -> int:
    """Bytes of the largest part of the weights that is gathered at a time."""
    phases = sharded_bytes(engine, model)
    return phases["save"] - phases["sample"]
