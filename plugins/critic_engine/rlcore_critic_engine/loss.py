"""The clipped value loss. Letters: B rows, T token positions."""

import torch

from rlcore.engines.hf import LossTerms, MicroBatch, Predictions


class ValueLoss:
    """Half the squared distance between a token's value and its return: the larger of two, for the value and for the
    value clipped to within `clip` of that at the step's start (PPO's value clipping; arXiv 1707.06347 and its code).

    The engine masks, weights and sums, so the denominator is the actor's: over the whole global mini-batch.
    """

    def __init__(self, clip: float) -> None:
        self._clip = clip

    def __call__(self, micro: MicroBatch, predictions: Predictions) -> LossTerms:
        """The loss of each token; ValueError when the batch lacks returns or the values from the step's start.

        Metrics are averaged over loss tokens: critic/squared_error, and critic/clip_frac, the share of tokens whose
        loss is that of the clipped value.
        """
        if micro.batch.returns_BT is None or micro.batch.values_BT is None:
            raise ValueError("the mini-batch has no returns or no values from the step's start")
        values_BT = predictions.scores_BT
        returns_BT = micro.per_token(micro.batch.returns_BT)
        old_BT = micro.per_token(micro.batch.values_BT)
        plain_BT = (values_BT - returns_BT) ** 2
        metrics = {"critic/squared_error": plain_BT}
        if not self._clip:
            return LossTerms(0.5 * plain_BT, metrics)
        kept_BT = old_BT + torch.clamp(values_BT - old_BT, -self._clip, self._clip)
        clipped_BT = (kept_BT - returns_BT) ** 2
        is_far_BT = (values_BT - old_BT).abs() > self._clip  # kept_BT of the others differs from the value by rounding
        metrics["critic/clip_frac"] = (is_far_BT & (clipped_BT > plain_BT)).to(plain_BT.dtype)
        return LossTerms(0.5 * torch.maximum(plain_BT, clipped_BT), metrics)
