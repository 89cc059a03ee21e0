"""Log-probs, their entropy, and values of a batch, without gradients."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from rlcore.data.batch import select
from rlcore.engines.hf.train.context import ContextGroup
from rlcore.engines.hf.train.microbatch import MicroBatch, split
from rlcore.engines.hf.train.model import PolicyModel, ValueModel
from rlcore.types import Batch, Float32s, SharedPrefix


@torch.no_grad()
def score(
    model: PolicyModel | ValueModel,
    batch: Batch,
    *,
    max_tokens: int,
    temperature: float,
    device: torch.device,
    shared_prefix: SharedPrefix = SharedPrefix.NONE,
    context: ContextGroup | None = None,
    with_entropy: bool = False,
    others: Callable[[int], Sequence[Batch]] = lambda num_passes: (),
) -> Float32s:
    """(K, B, T) log-probs or values of the batch's loss tokens, 0 elsewhere; micro-batches of at most `max_tokens`.

    K is 1, or 2 `with_entropy`: entropies in nats then are behind log-probs. `others`, told the number of
    micro-batches, gives those whose scores are discarded: they are computed while another rank is at its own.
    """
    scores_KBT = np.zeros((1 + with_entropy, *batch.tokens.loss_mask_BT.shape), dtype=np.float32)
    with model.attending(shared_prefix):
        chosen = split(batch, max_tokens, shared_prefix) if len(batch) else []
        discarded = others(len(chosen))
        for rows in chosen:
            micro = MicroBatch(select(batch, rows), device, shared_prefix, context)
            found = model(micro, temperature, with_entropy)
            for scores_BT, scores_N in zip(scores_KBT, found, strict=False):
                some_BT = micro.spread(scores_N).float().cpu().numpy()
                scores_BT[rows, : some_BT.shape[1]] = some_BT
        for part in discarded:
            model(MicroBatch(part, device, shared_prefix, context), temperature, with_entropy)
    return scores_KBT
