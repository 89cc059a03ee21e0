"""Memory of ranks that shard a model, by phase, on devices and in host memory.

Between steps a rank has its shard of weights, masters and moments; during passes also the gathered weights
(`rlcore.plan.gathered`). Compared with measurements in docs/results/sharding.md.
"""

from rlcore.config import EngineConfig
from rlcore.contracts.clusters import WorkerPlan
from rlcore.contracts.requests import ModelFacts
from rlcore.plan.activations import BYTES, HALF
from rlcore.plan.gathered import gathered_bytes, largest_unit
from rlcore.plan.memory import (
    at_work_bytes_per_parameter,
    resting_bytes_per_parameter,
    training_bytes_per_parameter,
)
from rlcore.plan.run_plan import RunPlan
from rlcore.types import COPIED_KINDS

MOMENT_BYTES = {"float64": 16.0, "float32": 8.0, "bfloat16": 12.0, "float16": 12.0}
"""Bytes per parameter: the optimizer's state, with the masters of half precision."""


def sharded_bytes(engine: EngineConfig, model: ModelFacts) -> dict[str, int]:
    """Bytes of one rank by phase, without activations and CUDA context; with LoRA only the frozen weights."""
    parameters = model.parameters or 0
    masters = BYTES["float32"] if engine.dtype in HALF and not engine.lora.enabled else 0
    forward = gathered_bytes(engine, model, backward=False)
    backward = gathered_bytes(engine, model, backward=True)
    largest = largest_unit(engine, model)
    if engine.offload and not engine.lora.enabled:
        return _offloaded_bytes(engine, parameters, forward, backward, largest)
    held = int(resting_bytes_per_parameter(engine) * parameters)
    return {
        "start": int((BYTES[engine.dtype] + masters) * parameters / engine.shard_ranks) + forward,
        "sample": held,
        "score": held + forward,
        "update": int(training_bytes_per_parameter(engine) * parameters) + backward,
        "hand-over": held + largest,
        "save": held + largest,
    }


def saving_bytes(engine: EngineConfig, model: ModelFacts) -> int:
    """Bytes that a save adds to those of a sharded rank at rest: gathered weights, and a shard that was offloaded."""
    found = sharded_bytes(engine, model)
    return found["save"] - found["sample"]


def _offloaded_bytes(
    engine: EngineConfig, parameters: int, forward: int, backward: int, largest: int
) -> dict[str, int]:
    """The same for a rank whose weights and optimizer state are offloaded to the host.

    Optimizer state is on the device only during the optimizer step, when nothing is gathered.
    """
    share = parameters / engine.shard_ranks
    held, state = int(BYTES[engine.dtype] * share), int(MOMENT_BYTES[engine.dtype] * share)
    masters = BYTES["float32"] if engine.dtype in HALF else 0
    return {
        "start": held + int(masters * share) + forward,
        "sample": 0,
        "score": held + forward,
        "update": int(at_work_bytes_per_parameter(engine) * parameters) + max(backward, state),
        "hand-over": held + largest,
        "save": held + largest,
    }


def host_bytes(plan: RunPlan, worker: WorkerPlan) -> dict[str, int]:
    """Host memory in bytes of all ranks of a role that trains, by purpose, besides what it holds without GPUs.

    offload: offloaded weights and state; hand-over: the copy of the weights that is sent, or of one unit if sharded
    weights are written to files; save: copies to be written, of everything if training continues meanwhile. Adapters
    are small and not counted. Purposes without any are left out.
    """
    engine, request = worker.request.engine, worker.request
    if engine is None or not request.trains:
        return {}
    model = plan.facts.model_of(request)
    weights, state = (int(size * (model.parameters or 0)) for size in (BYTES[engine.dtype], MOMENT_BYTES[engine.dtype]))
    sharded = engine.shard_ranks > 1
    unit = largest_unit(engine, model) if sharded else weights
    found = {"hand-over": weights} if request.role.name == "actor" and plan.weights_kind in COPIED_KINDS else {}
    if request.gpus and not engine.lora.enabled:
        found["offload"] = (weights + state) * request.ranks // engine.shard_ranks if engine.offload else 0
        if request.role.name == "actor" and plan.weights_kind == "directory":
            found["hand-over"] = unit
        at_once = min(weights, unit * request.ranks) if sharded and not plan.saves_copies else weights
        found["save"] = state + at_once
    return {purpose: size for purpose, size in found.items() if size}
