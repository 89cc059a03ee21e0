"""Log-probs, their entropy, values and outputs of a batch, without gradients."""

from collections.abc import Sequence

import numpy as np
import torch

from rlcore.data.batch import select
from rlcore.engines.hf.train.classifier_model import ClassifierModel
from rlcore.engines.hf.train.context import ContextGroup
from rlcore.engines.hf.train.microbatch import MicroBatch
from rlcore.engines.hf.train.model import AnyModel
from rlcore.engines.hf.train.shards import idle
from rlcore.types import Batch, Float32s, Int64s, SharedPrefix


@torch.no_grad()
def score(
    model: AnyModel,
    batch: Batch,
    micro_batches: Sequence[Int64s],
    *,
    temperature: float,
    device: torch.device,
    shared_prefix: SharedPrefix = SharedPrefix.NONE,
    context: ContextGroup | None = None,
    with_entropy: bool = False,
) -> Float32s:
    """(K, B, T) scores of the loss tokens of the rows in `micro_batches`, 0 elsewhere.

    K is 1 for log-probs and values, 2 `with_entropy`: log-probs, then entropies in nats. For a classifier it is the
    number of outputs. A micro-batch without rows is computed to keep up with other ranks, and its scores are discarded.
    """
    num = model.num_outputs if isinstance(model, ClassifierModel) else 1 + with_entropy
    scores_KBT = np.zeros((num, *batch.tokens.loss_mask_BT.shape), dtype=np.float32)
    with model.attending(shared_prefix):
        for rows in micro_batches:
            micro = MicroBatch(select(batch, rows) if len(rows) else idle(batch), device, shared_prefix, context)
            found = model(micro, temperature, with_entropy)
            if not len(rows):
                continue
            for scores_BT, scores_N in zip(scores_KBT, found, strict=False):
                some_BT = micro.spread(scores_N).float().cpu().numpy()
                scores_BT[rows, : some_BT.shape[1]] = some_BT
    return scores_KBT
