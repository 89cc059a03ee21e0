"""Counts the floating-point operations of an update: the numerator of the metrics time/tflops and time/mfu."""

from itertools import chain

from torch import nn

from rlcore.engines.hf.train.backbone import Model
from rlcore.engines.hf.train.model import PolicyModel, ValueModel
from rlcore.engines.hf.train.ranks import shared_tokens
from rlcore.types import Batch, SharedPrefix


def update_flops(model: Model, batch: Batch, shared_prefix: SharedPrefix) -> float:
    """Operations that one update on the batch requires, forward and backward, whatever the implementation adds.

    A matrix of n weights costs 2 n per token forward, 2 n for the gradient of its inputs and 2 n for the weights'
    gradient if it is trained; the head counts at loss tokens only. Of a layer's experts those count that a token is
    routed to. Not counted: padding, recomputation by gradient checkpointing, repeats of shared tokens, attention scores
    and everything elementwise. It is a lower bound, and close for responses that are short compared with the hidden
    size.
    """
    head, embedding = _head(model), model.transformer.get_input_embeddings()
    outputs = model.transformer.get_output_embeddings()
    apart = {id(module.weight) for module in (head, embedding, outputs) if module is not None}
    everything = chain(model.transformer.base_model.parameters(), model.parameters())
    matrices = {
        id(parameter): parameter for parameter in everything if parameter.ndim >= 2 and id(parameter) not in apart
    }
    shares = _expert_shares(model)
    used = {key: shares.get(key, 1.0) * matrix.numel() for key, matrix in matrices.items()}
    size = sum(used.values())
    trained = sum(used[key] for key, matrix in matrices.items() if matrix.requires_grad)
    through = size if trained else 0
    needed = 2.0 * _num_tokens(batch, shared_prefix) * (size + through + trained)
    passes = 1 + (1 if trained else 0) + (1 if head.weight.requires_grad else 0)
    return float(needed + 2.0 * int(batch.num_sampled_B.sum()) * passes * head.weight.numel())


def _expert_shares(model: Model) -> dict[int, float]:
    """The share of an expert module's parameters that a token uses, by id: 0 for biases, which multiply nothing.

    Known are modules that hold the matrices of all experts in tensors of three dimensions, as in transformers 5.
    """
    config = model.transformer.config.get_text_config()
    per_token = getattr(config, "num_experts_per_tok", None)
    shares: dict[int, float] = {}
    for module in model.transformer.modules():
        number, own = getattr(module, "num_experts", None), list(module.parameters(recurse=False))
        if not isinstance(per_token, int) or not isinstance(number, int):
            continue
        if any(weight.ndim == 3 and len(weight) == number for weight in own):
            shares |= {id(weight): per_token / number if weight.ndim == 3 else 0.0 for weight in own}
    return shares


def _head(model: Model) -> nn.Linear:
    if isinstance(model, PolicyModel):
        return model.head.linear
    if isinstance(model, ValueModel):
        return model.value_head
    raise TypeError(f"{type(model).__name__} has no head")


def _num_tokens(batch: Batch, shared_prefix: SharedPrefix) -> int:
    """Tokens of the batch without padding; shared tokens count once."""
    return int(batch.lengths_B.sum()) - shared_tokens(batch, shared_prefix)
