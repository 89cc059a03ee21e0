"""Decoding of the plugin `null`: from one softmax over the byte vocabulary, the same at every position.

Shape letters: N tokens of a row, V vocabulary.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rlcore.data.tokenizer import ByteTokens
from rlcore.types import Completion, FinishReason, GenerateRequest, Sampling

if TYPE_CHECKING:
    from rlcore.testing.null_settings import NullSection

Float64s = npt.NDArray[np.float64]


def log_softmax(logits_V: Float64s, temperature: float) -> Float64s:
    """(V,) log-probs of softmax(logits / temperature); at temperature 0, which is greedy, of softmax(logits)."""
    scaled_V = logits_V / (temperature or 1.0)
    shifted_V = scaled_V - scaled_V.max()
    return np.asarray(shifted_V - np.log(np.exp(shifted_V).sum()))


def truncated(logprobs_V: Float64s, sampling: Sampling) -> Float64s:
    """(V,) log-probs under what top_k, then top_p of the rest, then min_p keep, as in the transformers backend: divided
    by the mass that is kept, and -inf elsewhere. A greedy sample is not truncated."""
    top_k = min(sampling.top_k, len(logprobs_V))
    if sampling.temperature == 0 or (not top_k and sampling.top_p >= 1 and sampling.min_p <= 0):
        return logprobs_V
    order_V = np.argsort(-logprobs_V, kind="stable")
    probs_V = np.exp(logprobs_V[order_V])
    if top_k:  # with all that are as probable as the last one
        probs_V = np.where(probs_V >= probs_V[top_k - 1], probs_V, 0.0)
    before_V = (probs_V.cumsum() - probs_V) / probs_V.sum()
    kept_V = (probs_V > 0) & (probs_V >= sampling.min_p * probs_V[0])
    if sampling.top_p < 1:
        kept_V &= before_V < sampling.top_p
    kept_V[0] = True
    found_V = np.full_like(logprobs_V, -np.inf)
    found_V[order_V[kept_V]] = np.log(probs_V[kept_V] / probs_V[kept_V].sum())
    return found_V


async def decode(
    requests: Sequence[GenerateRequest],
    settings: "NullSection",
    policy: Callable[[], tuple[int, int, Float64s]],
    decoded_so_far: Callable[[int], None] = lambda decoded: None,
    busy: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> AsyncGenerator[Completion, None]:
    """Yields short completions first, as if all rows were decoded together with `token_s` per token.

    `policy` returns version, number of the update, and logits. When these change, unfinished rows continue with the new
    logits.
    """
    began = time.monotonic()
    with busy():
        rows = [
            _Row(request, sample) for request in sorted(requests, key=lambda r: r.id) for sample in range(request.n)
        ]
    weights, decoded = None, 0
    while rows:
        version, update, logits_V = policy()
        if weights != (weights := (version, update)):
            with busy():
                for row in rows:
                    row.draw(logits_V, version, decoded)
            rows.sort(key=lambda row: (len(row.ids_N), row.request.id, row.sample), reverse=True)
        row = rows[-1]
        if decoded < len(row.ids_N):
            if settings.token_s:  # the weights may change between two tokens
                await asyncio.sleep(settings.token_s)
                decoded += 1
            else:
                decoded = len(row.ids_N)
        decoded_so_far(decoded)
        if settings.fail_at_token and decoded >= settings.fail_at_token:
            raise RuntimeError(f"token {decoded} fails, as plugins.null.fail_at_token says")
        if decoded >= len(row.ids_N):
            yield rows.pop().completion(time.monotonic() - began)


class _Row:
    """A sample while it is decoded."""

    def __init__(self, request: GenerateRequest, sample: int) -> None:
        self.request, self.sample = request, sample
        self._uniforms_N = np.random.default_rng([request.seed, sample]).random(request.sampling.max_tokens)
        self._drawn_N = np.zeros(request.sampling.max_tokens, np.int32)
        self._logprobs_N = np.zeros(request.sampling.max_tokens, np.float32)
        self._versions: list[tuple[int, int]] = []
        self._finish = FinishReason.LENGTH
        self.ids_N = self._drawn_N

    def draw(self, logits_V: Float64s, version: int, start: int) -> None:
        """Draw the tokens at `start` and later with these weights."""
        sampling = self.request.sampling
        logprobs_V = truncated(log_softmax(logits_V, sampling.temperature), sampling)
        if sampling.temperature == 0:
            self._drawn_N[start:] = int(logprobs_V.argmax())
        else:
            sums_V = np.exp(logprobs_V).cumsum()
            self._drawn_N[start:] = np.searchsorted(sums_V / sums_V[-1], self._uniforms_N[start:], side="right")
        self._logprobs_N[start:] = logprobs_V[self._drawn_N[start:]]
        if not self._versions or self._versions[-1][1] != version:
            self._versions.append((start, version))
        length, self._finish = _end(self._drawn_N, sampling)
        self.ids_N = self._drawn_N[:length]

    def completion(self, generate_s: float) -> Completion:
        """The completion of a row that has ended, without versions that came after its last token."""
        last = max(0, len(self.ids_N) - 1)
        return Completion(
            request_id=self.request.id,
            sample=self.sample,
            token_ids=self.ids_N.copy(),
            logprobs=self._logprobs_N[: len(self.ids_N)].copy(),
            finish=self._finish,
            version=self._versions[0][1],
            generate_s=generate_s,
            versions=tuple((start, version) for start, version in self._versions if start <= last),
        )


def _end(ids_N: npt.NDArray[np.int32], sampling: Sampling) -> tuple[int, FinishReason]:
    """(tokens to keep, finish reason): a row ends at the end token, or at the token that completes a stop string."""
    ends = [int(index) + 1 for index in np.flatnonzero(ids_N == ByteTokens.EOS)[:1]]
    # the end token is not a byte, but has to keep its place
    text = bytes(int(id_) % 256 for id_ in ids_N)
    ends += [text.index(stop.encode()) + len(stop.encode()) for stop in sampling.stop if stop.encode() in text]
    return (min(ends), FinishReason.STOP) if ends else (len(ids_N), FinishReason.LENGTH)
