"""Weights that ranks of a sharded engine gather at a time, in addition to their shards.

Layers are gathered one after the other. Parameters outside the layers (embeddings and head) stay gathered for a whole
pass and count twice, because torch copies them. Compared with measurements in docs/results/sharding.md.
"""

from rlcore.config import EngineConfig
from rlcore.contracts.requests import ModelFacts
from rlcore.plan.activations import BYTES
from rlcore.plan.experts import MATRICES, expert_parameters

FORWARD_LAYERS, BACKWARD_LAYERS = 2, 4
"""Layers that are gathered at a time: one computes while the next is fetched; backward includes their gradients."""


def gathered_bytes(engine: EngineConfig, model: ModelFacts, *, backward: bool) -> int:
    """Gathered bytes of a rank during a pass; all weights if the architecture is unknown."""
    if model.shape is None:
        return BYTES[engine.dtype] * (model.parameters or 0)
    outside, layer = _portions(model)
    return BYTES[engine.dtype] * (2 * outside + (BACKWARD_LAYERS if backward else FORWARD_LAYERS) * layer)


def largest_unit(engine: EngineConfig, model: ModelFacts) -> int:
    """Bytes of the largest unit that is gathered at a time while weights are written."""
    return BYTES[engine.dtype] * max(_portions(model))


def _portions(model: ModelFacts) -> tuple[int, int]:
    """(parameters outside the layers, parameters of the largest layer)."""
    shape, parameters = model.shape, model.parameters or 0
    if shape is None:
        return 0, parameters
    outside = min(parameters, 2 * shape.vocabulary * shape.hidden_size)
    layers, experts = max(1, shape.layers), shape.experts
    if experts is None:
        return outside, (parameters - outside) // layers
    routed = expert_parameters(parameters, shape.hidden_size, experts)
    dense, shared = (MATRICES * shape.hidden_size * size for size in (shape.inner_size, experts.shared_size))
    others = parameters - outside - routed - (layers - experts.layers) * dense - experts.layers * shared
    if not routed or others < 0:  # numbers are packed, or files lack some
        return outside, (parameters - outside) // layers
    return outside, others // layers + max(dense if experts.layers < layers else 0, shared + routed // experts.layers)
