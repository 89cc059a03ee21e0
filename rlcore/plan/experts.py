"""Counts the weights that a token uses, and the numbers that feed-forward layers keep, with and without experts.

The counts are for experts as transformers computes them by default (`grouped_mm`). Letters: H hidden size, E inner size
of an expert, k experts per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlcore.contracts.requests import Experts, ModelShape

MATRICES = 3
"""Matrices of a gated feed-forward layer."""
ROUTED = 12
"""Numbers in float32 per token and expert that it is routed to: indices and permutations, of eight bytes, and
scores."""
FLOAT32_ROUTERS = frozenset({"deepseek_v2", "deepseek_v3", "dots1", "glm4_moe", "glm4_moe_lite"})
"""Values of `model_type` whose routers keep a float32 copy of their input in half precision."""
GATED = {"gpt_oss": 7}
"""Numbers that the gate of an expert keeps per inner unit, by `model_type`; 4 with other models: gate, its activation,
up and their product."""


@dataclass(frozen=True)
class FeedForward:
    """The feed-forward of one kind of layer, in numbers of the engine's format."""

    layers: int
    kept: int
    """Numbers that a layer keeps for its backward pass."""
    backward: int
    """Temporary numbers in its backward pass, in addition to what it keeps."""
    forward: int
    """Numbers of its pass without gradients."""


def feed_forwards(shape: ModelShape, tokens: int, itemsize: int, *, trained: bool) -> Sequence[FeedForward]:
    """The kinds of feed-forward layers for that many tokens.

    `trained`: the experts' weights have gradients, each of them a temporary before it is added to their sum.
    """
    experts = shape.experts
    dense, inner = shape.layers - (experts.layers if experts else 0), tokens * shape.inner_size
    kinds = [FeedForward(dense, 4 * inner, 2 * inner, 3 * inner)] if dense else []
    if experts is not None:
        kinds.append(_mixture(shape, experts, tokens, itemsize, trained))
    return kinds


def _mixture(shape: ModelShape, experts: Experts, tokens: int, itemsize: int, trained: bool) -> FeedForward:
    """A layer with experts."""
    chosen, wide = experts.computed or experts.per_token, max(4, itemsize) // itemsize
    inputs, inner = tokens * chosen * shape.hidden_size, tokens * chosen * experts.inner_size
    shared, gated = tokens * experts.shared_size, GATED.get(shape.model_type, 4) * inner
    router = wide * tokens * (experts.number + ROUTED * chosen)
    router += wide * tokens * shape.hidden_size if wide > 1 and shape.model_type in FLOAT32_ROUTERS else 0
    # The inputs of each expert, and its outputs before they are scaled; of shared experts the output is kept, too.
    outputs = tokens * shape.hidden_size if shared else 0
    kept = gated + 2 * inputs + 4 * shared + outputs + router
    matrix = experts.number * shape.hidden_size * experts.inner_size if trained else 0
    # Gradients of the scaled outputs; of the last matrix; of gate and up; of their matrix.
    backward = max(3 * inputs, inner + matrix, gated - inputs, 2 * matrix - (gated - 2 * inner), 2 * shared)
    return FeedForward(experts.layers, kept, backward, inputs + max(gated, 3 * inputs) + shared)


def used_parameters(parameters: int, hidden_size: int, experts: Experts | None, tokens: float = 1.0) -> float:
    """Parameters that `tokens` tokens use on average if their experts are drawn at random: all of a dense model, and
    of a mixture of experts all but the experts that none of them is routed to."""
    if experts is None:
        return float(parameters)
    routed = expert_parameters(parameters, hidden_size, experts)
    missed: float = (1 - experts.per_token / experts.number) ** tokens
    return parameters - routed * missed


def computed_parameters(parameters: int, hidden_size: int, experts: Experts | None) -> float:
    """Parameters that a token is multiplied with in training: those that it uses, unless transformers computes more
    experts than routers choose."""
    if experts is None or not experts.computed:
        return used_parameters(parameters, hidden_size, experts)
    return used_parameters(parameters, hidden_size, replace(experts, per_token=experts.computed))


def expert_parameters(parameters: int, hidden_size: int, experts: Experts | None) -> int:
    """Parameters of the experts that routers choose from; 0 if files have fewer numbers because they pack weights."""
    if experts is None:
        return 0
    routed = experts.layers * experts.number * MATRICES * hidden_size * experts.inner_size
    return routed if routed < parameters else 0


def layer_values(layers: int, hidden_size: int, inner_size: int, experts: Experts | None) -> float:
    """Numbers per token that the feed-forward of a layer writes, as a mean over all layers.

    These are gate, its activation, up and their product; for each expert that computes the token also its inputs and
    its outputs.
    """
    if experts is None:
        return 4.0 * inner_size
    each = (experts.computed or experts.per_token) * (4 * experts.inner_size + 2 * hidden_size)
    return (experts.layers * (each + 4 * experts.shared_size) + (layers - experts.layers) * 4 * inner_size) / layers
