"""Checks that a loaded model can share prefixes as planned, by computing two small groups both ways."""

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from rlcore.contracts.model_files import SLIDING
from rlcore.data.batch import needed_tokens
from rlcore.engines.hf.train.backbone import Model
from rlcore.engines.hf.train.context import ContextGroup
from rlcore.engines.hf.train.microbatch import MicroBatch
from rlcore.engines.hf.train.model import PolicyModel
from rlcore.engines.hf.train.trial_noise import difference_and_bound
from rlcore.errors import ConfigError, describe
from rlcore.types import Batch, Int64s, SharedPrefix, TokenArrays

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Largest difference of a hidden state, relative to the largest hidden state; bfloat16 rounds at every layer."""


@torch.no_grad()
def check_shared_prefix(model: Model, shared_prefix: SharedPrefix, who: str) -> None:
    """ConfigError naming `who` unless the hidden states equal those of rows computed individually."""
    if shared_prefix is SharedPrefix.NONE:
        return
    if shared_prefix is SharedPrefix.CACHE and _checkpoints(model.transformer):
        found = "with gradient_checkpointing=true transformers drops the cache"
        raise ConfigError(f"{who}.shared_prefix=cache: {found}; choose tree or none")
    weight = next(model.transformer.parameters())  # a value head may have another number format
    batch = two_groups(model.transformer.config.get_text_config().vocab_size)
    rows = MicroBatch(batch, weight.device)
    plain_NH = model.hidden_at(rows)
    try:
        with model.attending(shared_prefix):
            shared_NH = model.hidden_at(MicroBatch(batch, weight.device, shared_prefix))
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError) as cause:
        raise ConfigError(_cannot(model, shared_prefix, who, _reason(model, shared_prefix, cause))) from cause
    difference, bound = difference_and_bound(
        model.transformer,
        _relative(plain_NH, shared_NH),
        TOLERANCES[weight.dtype],
        lambda: _relative(plain_NH, model.hidden_at(rows)),
    )
    if not difference <= bound:
        found = f"its hidden states differ by {difference:.2g} of the largest"
        raise ConfigError(_cannot(model, shared_prefix, who, found))


def check_windows(model: Model, shared_prefix: SharedPrefix, batch: Batch, who: str) -> None:
    """ConfigError naming `who` for rows that are longer than a sliding window, which the attention of `tree` ignores.

    The last loss token of a row is not computed, so it does not count.
    """
    config = model.transformer.config.get_text_config()
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if shared_prefix is not SharedPrefix.TREE or not window or (kinds and SLIDING not in kinds):
        return
    longest = int(needed_tokens(batch).max(initial=0))
    if longest > window:
        raise ConfigError(
            f"{who}.shared_prefix=tree: a row has {longest + 1} tokens, and {type(model.transformer).__name__} has a "
            f"sliding window of {window}, which a shared prompt is computed without; choose {who}.shared_prefix=none, "
            "or fewer tokens per row"
        )


@torch.no_grad()
def check_context(model: Model, shared_prefix: SharedPrefix, context: ContextGroup, who: str) -> None:
    """ConfigError naming `who` unless ranks with slices of a sequence give the same scores as one rank with all of it.

    All ranks of the group have to come here.
    """
    name = f"{who}.context_parallel={context.num}"
    if shared_prefix is not SharedPrefix.TREE:
        raise ConfigError(
            f"{name}: its slices need the attention of shared_prefix=tree, and it is {shared_prefix}; choose "
            f"{who}.context_parallel=1"
        )
    config = model.transformer.config.get_text_config()
    if config.num_attention_heads % context.num:
        found = f"its model has {config.num_attention_heads} heads of attention"
        raise ConfigError(f"{name}: {found}; needs a number that divides them, or {who}.context_parallel=1")
    weight = next(model.transformer.parameters())
    batch = two_groups(config.vocab_size)
    with model.attending(shared_prefix):
        packed = MicroBatch(batch, weight.device, shared_prefix)
        whole_N = _trial_scores(model, packed)
        sliced_N = _trial_scores(model, MicroBatch(batch, weight.device, shared_prefix, context))
        difference, bound = difference_and_bound(
            model.transformer,
            _relative(whole_N, sliced_N),
            TOLERANCES[weight.dtype],
            lambda: _relative(whole_N, _trial_scores(model, packed)),
        )
    if not difference <= bound:
        raise ConfigError(
            f"{name}: {type(model.transformer).__name__} cannot be computed in slices (its scores differ by "
            f"{difference:.2g} of the largest); choose {who}.context_parallel=1"
        )


def _relative(first: Tensor, second: Tensor) -> Tensor:
    """(N,) largest difference of each of (N,) or (N, H) states, relative to the largest number of the first."""
    difference_N = (first - second).abs().reshape(len(first), -1).amax(1)
    return difference_N / first.abs().max().clamp_min(1e-3)


def _trial_scores(model: Model, micro: MicroBatch) -> Tensor:
    """(N,) log-probs; for a value model, whose head may be zero, the norms of its hidden states."""
    if isinstance(model, PolicyModel):
        scores_N: Tensor = model(micro, 1.0, False)[0]
        return scores_N
    norm_N = model.hidden_at(micro).float().norm(dim=1)
    return micro.of_all(norm_N, norm_N)[0]


def _checkpoints(transformer: Module) -> bool:
    """True if some layer has gradient checkpointing; the model's own property for it has another name in version 6."""
    return any(getattr(module, "gradient_checkpointing", False) for module in transformer.modules())


def _reason(model: Model, shared_prefix: SharedPrefix, cause: Exception) -> str:
    """The reason why a trial failed: that of the architecture if it is known, else the exception."""
    if shared_prefix is SharedPrefix.TREE and not getattr(model.transformer, "_supports_attention_backend", True):
        return "its layers compute attention with the model's code, which takes no tree"
    return describe(cause).partition("\n")[0]


def _cannot(model: Model, shared_prefix: SharedPrefix, who: str, found: str) -> str:
    other = SharedPrefix.CACHE if shared_prefix is SharedPrefix.TREE else SharedPrefix.TREE
    return (
        f"{who}.shared_prefix={shared_prefix}: {type(model.transformer).__name__} cannot compute a shared prompt this "
        f"way ({found}); choose {who}.shared_prefix=none or {other}"
    )


def two_groups(vocabulary: int) -> Batch:
    """Prefixes of 3 and 5 tokens, each with two rows of different length."""
    lengths_B: Int64s = np.array([6, 8, 7, 9])
    prefixes_B: Int64s = np.array([3, 3, 5, 5])
    columns = np.arange(9)
    valid_BT = columns < lengths_B[:, None]
    loss_mask_BT = valid_BT & (columns >= prefixes_B[:, None])
    row_B = np.where(columns < prefixes_B[:, None], prefixes_B[:, None], 11 + np.arange(4)[:, None])
    token_ids_BT = np.where(valid_BT, (row_B * 7919 + columns * 104729) % vocabulary, 0).astype(np.int32)
    return Batch(
        tokens=TokenArrays(token_ids_BT, valid_BT, loss_mask_BT, np.zeros((4, 9), dtype=np.float32)),
        sample_B=np.arange(4),
        group_B=np.array([0, 0, 1, 1]),
        lengths_B=lengths_B,
        num_sampled_B=lengths_B - prefixes_B,
        prompt_lengths_B=prefixes_B,
        rewards_B=np.zeros(4, dtype=np.float32),
    )
