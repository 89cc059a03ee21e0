"""Explained variance of a step's returns by the critic's values."""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rlcore.types import Batch, Metrics


@dataclass
class Moments:
    """Number, mean and sum of squared distances from the mean, of numbers that come in parts."""

    num: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, values_N: npt.NDArray[np.float64]) -> None:
        """Add a part, which has one number or more. Parts are merged as in https://doi.org/10.2307/2683386."""
        mean, num = float(values_N.mean()), self.num + len(values_N)
        apart = mean - self.mean
        self.squares += float(((values_N - mean) ** 2).sum()) + apart**2 * self.num * len(values_N) / num
        self.mean += apart * len(values_N) / num
        self.num = num


class ExplainedVariance:
    """Values at the step's start and returns of the loss tokens of a step's mini-batches."""

    def __init__(self) -> None:
        self._values, self._returns, self._errors = Moments(), Moments(), Moments()
        self._low, self._high = math.inf, -math.inf
        """The lowest and highest return."""

    def add(self, minibatch: Batch) -> None:
        """Add the loss tokens of a mini-batch, which may have none; rows of weight 0 have none."""
        if minibatch.values_BT is None or minibatch.returns_BT is None:
            raise ValueError("the mini-batch has no returns or no values from the step's start")
        mask_BT = minibatch.tokens.loss_mask_BT
        if minibatch.weights_B is not None:
            mask_BT = mask_BT & (minibatch.weights_B != 0)[:, None]
        if not mask_BT.any():
            return
        values_N = minibatch.values_BT[mask_BT].astype(np.float64)
        returns_N = minibatch.returns_BT[mask_BT].astype(np.float64)
        self._values.add(values_N)
        self._returns.add(returns_N)
        self._errors.add(returns_N - values_N)
        self._low, self._high = min(self._low, float(returns_N.min())), max(self._high, float(returns_N.max()))

    def metrics(self) -> Metrics:
        """Means over the loss tokens of the values and the returns, and the share of variance explained.

        critic/explained_variance is 1 - Var(returns - values) / Var(returns) over all tokens together, because a mean
        over mini-batches would be that of a mini-batch whose returns hardly differ. It is left out when all returns are
        equal, and everything without a token.
        """
        if not self._returns.num:
            return {}
        metrics = {"critic/value_mean": self._values.mean, "critic/return_mean": self._returns.mean}
        if self._low < self._high:
            metrics["critic/explained_variance"] = 1.0 - self._errors.squares / self._returns.squares
        return metrics
