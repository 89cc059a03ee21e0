"""Drawing tokens from logits, each row with its own settings and its own random numbers.

One number of [0, 1) a row, one exponential a logit, and sums over blocks of the vocabulary: the block in which the
cumulated probability passes the number is found first, then the token within it. Nothing is sorted but the most
probable tokens of rows that truncate.

Letters: R rows that are decoded together, r some of them, V vocabulary, N blocks of it, K most probable tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlcore.types import Sampling

Float64s = npt.NDArray[np.float64]

BLOCK = 1024
"""Entries of the vocabulary in one block."""
CHUNK_ELEMENTS = 2**19
"""Logits that are treated at a time on a CPU: few enough to stay in its cache between two passes."""
FIRST_TOP = 64
"""How many of the most probable tokens a truncating row looks at first."""


def row_stream(seed: int, sample: int) -> np.random.Generator:
    """The random stream of one sample of a request: a function of (seed, sample) and of nothing else."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed % 2**64, sample])))


@dataclass(frozen=True, eq=False)
class RowSampling:
    """The settings of rows that are decoded together."""

    temperature_R: Tensor | None
    """1 for a greedy row: what is recorded for it is the plain softmax. None where it is 1 for all."""
    greedy: tuple[int, ...]
    """Which rows take the most probable token."""
    truncated: tuple[int, ...]
    """Which rows draw from a part of the vocabulary only."""
    top_p_r: Tensor
    """Of the truncated rows, as the next two."""
    top_k_r: Tensor
    """The vocabulary's size where nothing is cut off."""
    min_p_r: Tensor

    @classmethod
    def of(cls, settings: Sequence[Sampling], vocabulary: int, device: torch.device) -> "RowSampling":
        """One row for each of `settings`."""
        temperature = [each.temperature or 1.0 for each in settings]
        greedy = tuple(i for i, each in enumerate(settings) if each.temperature == 0.0)
        truncated = tuple(
            i
            for i, each in enumerate(settings)
            if each.temperature > 0.0 and (each.top_p < 1.0 or 0 < each.top_k < vocabulary or each.min_p > 0.0)
        )
        top_k = [min(settings[i].top_k, vocabulary) if settings[i].top_k > 0 else vocabulary for i in truncated]
        return cls(
            temperature_R=torch.tensor(temperature, device=device) if set(temperature) - {1.0} else None,
            greedy=greedy,
            truncated=truncated,
            top_p_r=torch.tensor([settings[i].top_p for i in truncated], device=device, dtype=torch.float64),
            top_k_r=torch.tensor(top_k, device=device, dtype=torch.int64),
            min_p_r=torch.tensor([settings[i].min_p for i in truncated], device=device, dtype=torch.float64),
        )


def draw(logits_RV: Tensor, settings: RowSampling, uniforms_R: Float64s) -> tuple[Tensor, Tensor]:
    """(R,) token ids and (R,) their log-probs under softmax(logits / temperature), untruncated.

    `uniforms_R` are numbers of [0, 1), one a row. A row whose log-prob is not finite had logits that are no numbers;
    its token means nothing.
    """
    if settings.temperature_R is not None:
        logits_RV = logits_RV / settings.temperature_R[:, None]
    uniforms = torch.as_tensor(uniforms_R, device=logits_RV.device)
    token_R = torch.empty(len(logits_RV), dtype=torch.int64, device=logits_RV.device)
    log_sum_R = torch.empty(len(logits_RV), dtype=logits_RV.dtype, device=logits_RV.device)
    scratch_rV: Tensor | None = None
    for rows in _chunks(logits_RV):
        chunk_rV = logits_RV[rows]
        if scratch_rV is None:
            width = -(-logits_RV.shape[1] // BLOCK) * BLOCK
            scratch_rV = chunk_rV.new_zeros((len(chunk_rV), width))  # what is beyond the vocabulary stays 0
        token_R[rows], log_sum_R[rows] = _draw_whole(chunk_rV, uniforms[rows], scratch_rV[: len(chunk_rV)])
    if settings.greedy:
        greedy_r = torch.tensor(settings.greedy, device=logits_RV.device)
        token_R[greedy_r] = logits_RV[greedy_r].argmax(dim=-1)
    if settings.truncated:
        cut_r = torch.tensor(settings.truncated, device=logits_RV.device)
        token_R[cut_r] = _draw_truncated(logits_RV[cut_r] - log_sum_R[cut_r, None], settings, uniforms[cut_r])
    return token_R, logits_RV.gather(1, token_R[:, None])[:, 0] - log_sum_R


def _draw_whole(logits_rV: Tensor, uniforms_r: Tensor, scratch_rV: Tensor) -> tuple[Tensor, Tensor]:
    """(r,) tokens drawn from the whole vocabulary, and the (r,) log of the sum of exponentials."""
    vocabulary = logits_rV.shape[1]
    highest_r1 = logits_rV.amax(dim=-1, keepdim=True)
    torch.sub(logits_rV, highest_r1, out=scratch_rV[:, :vocabulary])
    scratch_rV[:, :vocabulary].exp_()
    blocks_rNB = scratch_rV.view(len(scratch_rV), -1, BLOCK)
    # Float64 from here on, so that 10^5 small probabilities do not lose the last of them.
    block_r, rest_r = _pass_through(blocks_rNB.sum(dim=-1).double(), uniforms_r)
    chosen_rB = blocks_rNB[torch.arange(len(blocks_rNB), device=blocks_rNB.device), block_r].double()
    inside_r, _ = _pass_through(chosen_rB, rest_r)
    token_r = (block_r * BLOCK + inside_r).clamp_(max=vocabulary - 1)  # beyond only where there are NaN
    return token_r, (highest_r1 + blocks_rNB.sum(dim=(1, 2))[:, None].log())[:, 0]


def _pass_through(mass_rN: Tensor, uniforms_r: Tensor) -> tuple[Tensor, Tensor]:
    """(r,) where the cumulated mass first exceeds uniform * total, and (r,) how far into that entry, in [0, 1)."""
    cumulated_rN = mass_rN.cumsum(dim=-1)
    total_r = cumulated_rN[:, -1]
    threshold_r1 = torch.minimum(uniforms_r * total_r, torch.nextafter(total_r, torch.zeros_like(total_r)))[:, None]
    place_r1 = torch.searchsorted(cumulated_rN, threshold_r1, right=True).clamp_(max=mass_rN.shape[1] - 1)
    mass_r1 = mass_rN.gather(1, place_r1)
    into_r1 = (threshold_r1 - (cumulated_rN.gather(1, place_r1) - mass_r1)) / mass_r1
    return place_r1[:, 0], into_r1[:, 0].clamp_(0.0, 1.0)


def _draw_truncated(logprobs_rV: Tensor, settings: RowSampling, uniforms_r: Tensor) -> Tensor:
    """(r,) tokens drawn after top_k, then top_p of the rest, then min_p have ruled out what transformers rules out.

    Each keeps the most probable tokens up to some place in their order, so only as many are put in order as are
    needed to see where the first of them cuts; tokens as probable as the last one that top_k keeps stay.
    """
    vocabulary = logprobs_rV.shape[1]
    num = min(FIRST_TOP, vocabulary)
    while True:
        top_rK, order_rK = logprobs_rV.topk(num, dim=-1)
        kept_r, is_known = _num_kept(top_rK.double().exp(), settings, vocabulary)
        if num == vocabulary or is_known:
            break
        num = min(8 * num, vocabulary)
    inside_rK = torch.arange(num, device=logprobs_rV.device)[None] < kept_r[:, None]
    place_r, _ = _pass_through(torch.where(inside_rK, top_rK.double().exp(), 0.0), uniforms_r)
    return order_rK.gather(1, place_r[:, None])[:, 0]


def _num_kept(top_rK: Tensor, settings: RowSampling, vocabulary: int) -> tuple[Tensor, bool]:
    """(r,) how many of the most probable tokens stay, and whether that is certain for every row.

    `top_rK` are the highest probabilities, in order. A row is certain when the last of them is already cut off.
    """
    num = top_rK.shape[1]
    edge_r1 = (settings.top_k_r - 1).clamp(max=num - 1)[:, None]
    uses_top_k_r = settings.top_k_r < vocabulary
    stays_rK = (top_rK >= top_rK.gather(1, edge_r1)) | ~uses_top_k_r[:, None]
    top_k_known_r = ~uses_top_k_r | ((settings.top_k_r < num) & ~stays_rK[:, -1])
    kept_rK = torch.where(stays_rK, top_rK, 0.0)
    total_r1 = torch.where(uses_top_k_r[:, None], kept_rK.sum(dim=-1, keepdim=True), 1.0)
    # A token stays while the mass before it is less than top_p.
    before_rK = (kept_rK.cumsum(dim=-1) - kept_rK) / total_r1
    stays_rK &= (before_rK < settings.top_p_r[:, None]) | (settings.top_p_r >= 1.0)[:, None]
    stays_rK &= top_rK >= settings.min_p_r[:, None] * top_rK[:, :1]
    stays_rK[:, 0] = True
    known = top_k_known_r & ~stays_rK[:, -1]
    # NaN never becomes known by growing; its row is reported by its log-prob.
    return stays_rK.sum(dim=-1), bool((known | top_rK.isnan().any(dim=-1)).all())


def _chunks(logits_RV: Tensor) -> Iterator[slice]:
    """All rows on an accelerator, few at a time on a CPU."""
    rows, vocabulary = logits_RV.shape
    size = rows if logits_RV.device.type != "cpu" else max(1, CHUNK_ELEMENTS // vocabulary)
    for start in range(0, rows, max(1, size)):
        yield slice(start, min(start + size, rows))
