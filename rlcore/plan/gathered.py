"""Weights that ranks of a sharded engine gather at a time, beside their parts.

Layers are gathered one after the other. What is in no layer, embeddings and head, is gathered for as long as a pass
takes, and counts twice: torch copies what it gathers. Held against measurements of docs/results/sharding.md.
"""

from rlcore.config import EngineConfig
from rlcore.contracts.requests import ModelFacts
from rlcore.plan.activations import BYTES

FORWARD_LAYERS, BACKWARD_LAYERS = 2, 4
"""Layers that are there at a time: one computes, the next is on its way; backward their gradients, too."""


def gathered_bytes(engine: EngineConfig, model: ModelFacts, *, backward: bool) -> int:
    """Bytes of a rank during a pass; of an unknown architecture those of all weights."""
    if model.shape is None:
        return BYTES[engine.dtype] * (model.parameters or 0)
    outside, layer = _portions(model)
    return BYTES[engine.dtype] * (2 * outside + (BACKWARD_LAYERS if backward else FORWARD_LAYERS) * layer)


def largest_unit(engine: EngineConfig, model: ModelFacts) -> int:
    """Bytes of the largest part of the weights that is gathered at a time while they are written."""
    return BYTES[engine.dtype] * max(_portions(model))


def _portions(model: ModelFacts) -> tuple[int, int]:
    """(parameters in no layer, parameters of a layer)."""
    shape, parameters = model.shape, model.parameters or 0
    if shape is None:
        return 0, parameters
    outside = min(parameters, 2 * shape.vocabulary * shape.hidden_size)
    return outside, (parameters - outside) // max(1, shape.layers)
