"""Draws tokens from logits; each row has separate settings and random numbers.

Takes one number of [0, 1) per row, one softmax, and sums over blocks of the vocabulary: first it finds the block in
which the cumulative probability exceeds the number, then the token within it. Only rows with truncation sort, and only
their most probable tokens.

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
"""Logits that a CPU processes at a time: few enough to stay in its cache between two passes."""
FIRST_TOP = 64
"""Number of the most probable tokens that a truncating row looks at first."""


def row_stream(seed: int, sample: int) -> np.random.Generator:
    """The random stream of one sample of a request: a function of (seed, sample) only."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed % 2**64, sample])))


@dataclass(frozen=True, eq=False)
class RowSampling:
    """The settings of rows that are decoded together."""

    temperature_R: Tensor | None
    """1 for a greedy row, whose recorded log-prob is that of the plain softmax. None if it is 1 for all rows."""
    greedy: tuple[int, ...]
    """Rows that take the most probable token."""
    truncated: tuple[int, ...]
    """Rows that draw from a part of the vocabulary only."""
    top_p_r: Tensor
    """Settings of the truncated rows, like the next two."""
    top_k_r: Tensor
    """The vocabulary's size if top_k is off."""
    min_p_r: Tensor

    @classmethod
    def of(cls, settings: Sequence[Sampling], vocabulary: int, device: torch.device) -> "RowSampling":
        """One row for each of `settings`."""
        temperature = [setting.temperature or 1.0 for setting in settings]
        greedy = tuple(i for i, setting in enumerate(settings) if setting.temperature == 0.0)
        truncated = tuple(
            i
            for i, setting in enumerate(settings)
            if setting.temperature > 0.0
            and (setting.top_p < 1.0 or 0 < setting.top_k < vocabulary or setting.min_p > 0.0)
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

    def within(self, rows: slice) -> "RowSampling":
        """The settings of consecutive rows, except for their temperature."""
        if not self.greedy and not self.truncated:
            return self
        inside_r = torch.tensor(
            [rows.start <= flag < rows.stop for flag in self.truncated], device=self.top_p_r.device, dtype=torch.bool
        )
        return RowSampling(
            temperature_R=None,
            greedy=tuple(flag - rows.start for flag in self.greedy if rows.start <= flag < rows.stop),
            truncated=tuple(flag - rows.start for flag in self.truncated if rows.start <= flag < rows.stop),
            top_p_r=self.top_p_r[inside_r],
            top_k_r=self.top_k_r[inside_r],
            min_p_r=self.min_p_r[inside_r],
        )


def draw(logits_RV: Tensor, settings: RowSampling, uniforms_R: Float64s) -> tuple[Tensor, Tensor]:
    """(R,) token ids and (R,) log-probs under softmax(logits / temperature), renormalized over the kept tokens in
    truncated rows.

    `uniforms_R` are numbers of [0, 1), one per row. A log-prob that is not finite means that the row's logits were not
    finite; its token is meaningless.
    """
    uniforms_R1 = torch.as_tensor(uniforms_R, device=logits_RV.device)[:, None]
    tokens, logprobs = [], []
    for rows in _chunks(logits_RV):
        logits_rV = logits_RV[rows]
        if settings.temperature_R is not None:
            logits_rV = logits_rV / settings.temperature_R[rows, None]
        token_r1, logprob_r1 = _draw_chunk(logits_rV, settings.within(rows), uniforms_R1[rows])
        tokens.append(token_r1)
        logprobs.append(logprob_r1)
    return torch.cat(tokens)[:, 0], torch.cat(logprobs)[:, 0]


def _draw_chunk(logits_rV: Tensor, settings: RowSampling, uniforms_r1: Tensor) -> tuple[Tensor, Tensor]:
    """(r, 1) tokens and (r, 1) log-probs of rows whose logits have been divided by their temperatures."""
    probs_rV = torch.softmax(logits_rV, dim=-1)
    # Float64 from here on, so that 10^5 small probabilities do not lose the last of them.
    blocks_rN = _block_sums(probs_rV)
    token_r1 = _draw_whole(probs_rV, blocks_rN, uniforms_r1)
    if settings.greedy:
        greedy_r = torch.tensor(settings.greedy, device=logits_rV.device)
        token_r1[greedy_r] = logits_rV[greedy_r].argmax(dim=-1, keepdim=True)
    # A float32 softmax sums to 1 only approximately; dividing by the float64 sum makes its entries as exact as
    # possible.
    total_r1 = blocks_rN.sum(dim=-1, keepdim=True)
    if settings.truncated:
        cut_r = torch.tensor(settings.truncated, device=logits_rV.device)
        token_r1[cut_r], kept_r1 = _draw_truncated(probs_rV[cut_r], total_r1[cut_r], settings, uniforms_r1[cut_r])
        total_r1[cut_r] *= kept_r1
    return token_r1, (probs_rV.gather(1, token_r1).double() / total_r1).log_().to(logits_rV.dtype)


def _block_sums(probs_rV: Tensor) -> Tensor:
    """(r, N) sums of the blocks, the last of which may be shorter, in float64."""
    whole = probs_rV.shape[1] // BLOCK * BLOCK
    sums_rN = probs_rV[:, :whole].view(len(probs_rV), whole // BLOCK, BLOCK).sum(dim=-1)
    if whole < probs_rV.shape[1]:
        sums_rN = torch.cat([sums_rN, probs_rV[:, whole:].sum(dim=-1, keepdim=True)], dim=-1)
    return sums_rN.double()


def _draw_whole(probs_rV: Tensor, blocks_rN: Tensor, uniforms_r1: Tensor) -> Tensor:
    """(r, 1) tokens drawn from the whole vocabulary."""
    last = probs_rV.shape[1] - 1
    block_r1, rest_r1 = _pass_through(blocks_rN, uniforms_r1)
    place_rB = block_r1 * BLOCK + torch.arange(min(BLOCK, last + 1), device=probs_rV.device)
    mass_rB = probs_rV.gather(1, place_rB.clamp(max=last)).masked_fill_(place_rB > last, 0.0).double()
    inside_r1, _ = _pass_through(mass_rB, rest_r1)
    return (block_r1 * BLOCK + inside_r1).clamp_(max=last)  # beyond only where there are NaN


def _pass_through(mass_rN: Tensor, uniforms_r1: Tensor) -> tuple[Tensor, Tensor]:
    """(r, 1) index where the cumulative mass first exceeds uniform * total, and (r, 1) the position within that entry,
    in [0, 1)."""
    cumulated_rN = mass_rN.cumsum(dim=-1)
    total_r1 = cumulated_rN[:, -1:]
    threshold_r1 = torch.minimum(uniforms_r1 * total_r1, torch.nextafter(total_r1, torch.zeros_like(total_r1)))
    place_r1 = torch.searchsorted(cumulated_rN, threshold_r1, right=True).clamp_(max=mass_rN.shape[1] - 1)
    mass_r1 = mass_rN.gather(1, place_r1)
    into_r1 = (threshold_r1 - (cumulated_rN.gather(1, place_r1) - mass_r1)) / mass_r1
    return place_r1, into_r1.clamp_(0.0, 1.0)


def _draw_truncated(
    probs_rV: Tensor, total_r1: Tensor, settings: RowSampling, uniforms_r1: Tensor
) -> tuple[Tensor, Tensor]:
    """(r, 1) tokens drawn after truncation by top_k, then top_p of the rest, then min_p, as in transformers.

    Also returns the (r, 1) share of the probability that was kept.

    Each keeps the most probable tokens up to some rank, so only as many are sorted as are needed to find the first cut.
    Tokens as probable as the last one that top_k keeps are kept too.
    """
    vocabulary = probs_rV.shape[1]
    num = min(FIRST_TOP, vocabulary)
    while True:
        highest_rK, order_rK = probs_rV.topk(num, dim=-1)
        top_rK = highest_rK.double() / total_r1
        kept_r, is_known = _num_kept(top_rK, settings, vocabulary)
        if num == vocabulary or is_known:
            break
        num = min(8 * num, vocabulary)
    inside_rK = torch.arange(num, device=probs_rV.device) < kept_r[:, None]
    kept_rK = torch.where(inside_rK, top_rK, 0.0)
    place_r1, _ = _pass_through(kept_rK, uniforms_r1)
    return order_rK.gather(1, place_r1), kept_rK.sum(dim=-1, keepdim=True)


def _num_kept(top_rK: Tensor, settings: RowSampling, vocabulary: int) -> tuple[Tensor, bool]:
    """(r,) number of most probable tokens to keep, and whether that is certain for every row.

    `top_rK` are the highest probabilities, in order. A row is certain when the last of them is already cut off.
    """
    num = top_rK.shape[1]
    edge_r1 = (settings.top_k_r - 1).clamp(max=num - 1)[:, None]
    uses_top_k_r = settings.top_k_r < vocabulary
    stays_rK = (top_rK >= top_rK.gather(1, edge_r1)) | ~uses_top_k_r[:, None]
    top_k_known_r = ~uses_top_k_r | ((settings.top_k_r < num) & ~stays_rK[:, -1])
    kept_rK = torch.where(stays_rK, top_rK, 0.0)
    total_r1 = torch.where(uses_top_k_r[:, None], kept_rK.sum(dim=-1, keepdim=True), 1.0)
    # A token is kept while the mass before it is less than top_p.
    before_rK = (kept_rK.cumsum(dim=-1) - kept_rK) / total_r1
    stays_rK &= (before_rK < settings.top_p_r[:, None]) | (settings.top_p_r >= 1.0)[:, None]
    stays_rK &= top_rK >= settings.min_p_r[:, None] * top_rK[:, :1]
    stays_rK[:, 0] = True
    known = top_k_known_r & ~stays_rK[:, -1]
    # Looking at more tokens does not resolve NaN; the row's log-prob reports it.
    return stays_rK.sum(dim=-1), bool((known | top_rK.isnan().any(dim=-1)).all())


def _chunks(logits_RV: Tensor) -> Iterator[slice]:
    """All rows on an accelerator, few at a time on a CPU."""
    rows, vocabulary = logits_RV.shape
    size = rows if logits_RV.device.type != "cpu" else max(1, CHUNK_ELEMENTS // vocabulary)
    for start in range(0, rows, max(1, size)):
        yield slice(start, min(start + size, rows))
