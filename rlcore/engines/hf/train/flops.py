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
    gradient if it is trained; the head counts at loss tokens only. Not counted: padding, recomputation by gradient
    checkpointing, repeats of shared tokens, attention scores and everything elementwise. It is a lower bound, and close
    for responses that are short compared with the hidden size.
    """
    head, embedding = _head(model), model.transformer.get_input_embeddings()
    outputs = model.transformer.get_output_embeddings()
    apart = {id(module.weight) for module in (head, embedding, outputs) if module is not None}
    everything = chain(model.transformer.base_model.parameters(), model.parameters())
    matrices = {
        id(parameter): parameter for parameter in everything if parameter.ndim >= 2 and id(parameter) not in apart
    }
    size = sum(matrix.numel() for matrix in matrices.values())
    trained = sum(matrix.numel() for matrix in matrices.values() if matrix.requires_grad)
    through = size if trained else 0
    needed = 2.0 * _num_tokens(batch, shared_prefix) * (size + through + trained)
    passes = 1 + (1 if trained else 0) + (1 if head.weight.requires_grad else 0)
    return float(needed + 2.0 * int(batch.num_sampled_B.sum()) * passes * head.weight.numel())


def _head(model: Model) -> nn.Linear:
    if isinstance(model, PolicyModel):
        return model.head.linear
    if isinstance(model, ValueModel):
        return model.value_head
    raise TypeError(f"{type(model).__name__} has no head")


def _num_tokens(batch: Batch, shared_prefix: SharedPrefix) -> int:
    """Tokens of the batch without padding; shared tokens count once."""
    return int(batch.lengths_B.sum()) - shared_tokens(batch, shared_prefix)
