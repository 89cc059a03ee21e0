"""Drawing tokens from logits, each row with its own settings and its own random numbers.

Letters: R rows that are decoded together, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlcore.types import Sampling

Float64s = npt.NDArray[np.float64]


def row_stream(seed: int, sample: int) -> np.random.Generator:
    """The random stream of one sample of a request: a function of (seed, sample) and of nothing else."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed % 2**64, sample])))


@dataclass(frozen=True, eq=False)
class RowSampling:
    """The settings of rows that are decoded together."""

    temperature_R: Tensor
    """1 for a greedy row: what is recorded for it is the plain softmax."""
    greedy_R: Tensor
    top_p_R: Tensor
    top_k_R: Tensor
    """The vocabulary's size where nothing is cut off."""
    min_p_R: Tensor

    @classmethod
    def of(cls, settings: Sequence[Sampling], vocabulary: int, device: torch.device) -> "RowSampling":
        """One row for each of `settings`."""
        greedy = [each.temperature == 0.0 for each in settings]
        temperature = [each.temperature or 1.0 for each in settings]
        top_k = [min(each.top_k, vocabulary) if each.top_k > 0 else vocabulary for each in settings]
        return cls(
            temperature_R=torch.tensor(temperature, device=device),
            greedy_R=torch.tensor(greedy, device=device),
            top_p_R=torch.tensor([each.top_p for each in settings], device=device),
            top_k_R=torch.tensor(top_k, device=device),
            min_p_R=torch.tensor([each.min_p for each in settings], device=device),
        )

    def take(self, rows_R: Tensor) -> "RowSampling":
        """The settings of some of the rows."""
        return RowSampling(
            self.temperature_R[rows_R],
            self.greedy_R[rows_R],
            self.top_p_R[rows_R],
            self.top_k_R[rows_R],
            self.min_p_R[rows_R],
        )


def draw(logits_RV: Tensor, settings: RowSampling, uniforms_R: Float64s) -> tuple[Tensor, Tensor]:
    """(R,) token ids and (R,) their log-probs under softmax(logits / temperature), untruncated.

    `uniforms_R` are numbers of [0, 1), one a row. A row whose log-prob is NaN had logits that are no numbers; its token
    means nothing.
    """
    logits_RV = logits_RV / settings.temperature_R[:, None]
    log_sum_R = torch.logsumexp(logits_RV, dim=-1)
    token_R = torch.empty(len(logits_RV), dtype=torch.int64, device=logits_RV.device)
    greedy = settings.greedy_R
    if bool(greedy.any()):
        token_R[greedy] = logits_RV[greedy].argmax(dim=-1)
    if not bool(greedy.all()):
        drawn = ~greedy
        all_drawn = bool(drawn.all())
        probs_RV = torch.exp((logits_RV if all_drawn else logits_RV[drawn]) - log_sum_R[drawn, None])
        _truncate(probs_RV, settings if all_drawn else settings.take(drawn))
        uniforms = torch.as_tensor(uniforms_R, device=logits_RV.device)[drawn]
        token_R[drawn] = _pick(probs_RV, uniforms)
    return token_R, logits_RV.gather(1, token_R[:, None])[:, 0] - log_sum_R


def _pick(probs_RV: Tensor, uniforms_R: Tensor) -> Tensor:
    """(R,) the tokens at which the cumulated probability first exceeds uniform * total: one random number a row.

    The sums run in float64, so that 10^5 small probabilities do not lose the last of them.
    """
    cumulated_RV = probs_RV.cumsum(dim=-1, dtype=torch.float64)
    total_R = cumulated_RV[:, -1]
    below_total_R = torch.nextafter(total_R, torch.zeros_like(total_R))
    threshold_R = torch.minimum(uniforms_R * total_R, below_total_R)
    token_R = torch.searchsorted(cumulated_RV, threshold_R[:, None], right=True)[:, 0]
    return token_R.clamp_(max=probs_RV.shape[1] - 1)  # beyond the end only where probabilities are NaN


def _truncate(probs_RV: Tensor, settings: RowSampling) -> None:
    """Set to 0 what top_k, then top_p of the rest, then min_p rule out, as transformers does; ties at the edge of top_k
    stay, and the most probable token always does."""
    vocabulary = probs_RV.shape[1]
    cut_R = settings.top_k_R < vocabulary
    if bool(cut_R.any()):
        top_RK = probs_RV[cut_R].topk(int(settings.top_k_R[cut_R].max()), dim=-1).values
        least_R1 = top_RK.gather(1, settings.top_k_R[cut_R, None] - 1)
        probs_RV[cut_R] = torch.where(probs_RV[cut_R] >= least_R1, probs_RV[cut_R], 0.0)
    cut_R = settings.top_p_R < 1.0
    if bool(cut_R.any()):
        sorted_RV, order_RV = probs_RV[cut_R].sort(dim=-1, descending=True, stable=True)
        cumulated_RV = sorted_RV.cumsum(dim=-1, dtype=torch.float64)
        # A token stays while the mass before it is less than top_p.
        before_RV = (cumulated_RV - sorted_RV) / cumulated_RV[:, -1:]
        sorted_RV[before_RV >= settings.top_p_R[cut_R, None]] = 0.0
        probs_RV[cut_R] = torch.zeros_like(sorted_RV).scatter_(1, order_RV, sorted_RV)
    if bool((settings.min_p_R > 0.0).any()):
        least_R1 = settings.min_p_R[:, None] * probs_RV.max(dim=-1, keepdim=True).values
        probs_RV[probs_RV < least_R1] = 0.0
