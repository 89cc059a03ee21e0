"""The embedded rollout: samples from the very weights that are being trained, with no copy of them.

Requests are taken in the order of their ids and decoded in *waves* of rows. A wave's prompts are computed once each,
their cache is copied to their samples, and rows that have ended leave the wave. Nothing depends on time or on the
order of submission: the same requests give the same tokens.

Letters: P prompts of a wave, R its rows, L positions so far, V vocabulary. Prompts are padded on the LEFT here.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from rlcore.backends.hf.kv_cache import GrowingCache
from rlcore.backends.hf.model import PolicyModel
from rlcore.backends.hf.sampling import Float64s, RowSampling, draw, row_stream
from rlcore.errors import ConfigError, WorkerError
from rlcore.tokens import Tokens
from rlcore.types import Completion, Finish, GenerateRequest

COMPACT_FRAC = 0.125
"""Rows leave the wave when at least this share of it has ended: dropping them copies the cache once."""


@dataclass(eq=False)
class Row:
    """One sample while it is decoded."""

    request: GenerateRequest
    sample: int
    uniforms: Float64s
    """(max_tokens,) the row's random numbers, one a token."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: Finish | None = None


class EmbeddedSampler:
    """Generates with a policy model; owns nothing between calls."""

    def __init__(self, model: PolicyModel, tokens: Tokens, *, max_rows: int, device: torch.device) -> None:
        self._model = model
        self._tokens = tokens
        self._max_rows = max_rows
        self._device = device
        self._vocabulary = model.head.linear.weight.shape[0]
        self.check_architecture()

    def check_architecture(self) -> None:
        """ConfigError for a model whose state is more than keys and values, or whose attention cannot mask padding."""
        config = self._model.transformer.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or [])
        if kinds - {"full_attention", "sliding_attention"} or getattr(self._model.transformer, "_is_stateful", False):
            raise ConfigError(
                f"rollout.backend=hf: {type(self._model.transformer).__name__} has layers other than attention "
                f"({', '.join(sorted(kinds)) or 'recurrent'}), which the embedded rollout cannot decode; choose a "
                "model with attention layers only, or another rollout backend"
            )
        transformer = self._model.transformer
        if transformer.config._attn_implementation == "eager" and transformer.dtype == torch.float64:
            # Its softmax runs in float32, where float64's masking value is -inf: padding becomes NaN and spreads.
            raise ConfigError(
                "rollout.backend=hf: model.attention=eager cannot mask padding in actor.dtype=float64; choose sdpa, or "
                "float32"
            )

    async def generate(self, requests: Sequence[GenerateRequest], version: int) -> AsyncIterator[Completion]:
        """Every completion of every request, each as it finishes.

        ConfigError when a prompt and its response do not fit the window, WorkerError when logits are not numbers.
        """
        started = time.monotonic()
        ordered = sorted(requests, key=lambda request: request.id)
        for request in ordered:
            self._check(request)
        rows = [
            Row(request, sample, row_stream(request.seed, sample).random(request.sampling.max_tokens))
            for request in ordered
            for sample in range(request.n)
        ]
        for start in range(0, len(rows), self._max_rows):
            wave = self._prefill(rows[start : start + self._max_rows])
            while True:
                for row in self._advance(wave):
                    yield _completion(row, version, time.monotonic() - started)
                # Other calls of this worker's loop get their turn between two tokens.
                await asyncio.sleep(0)
                if not self._forward(wave):
                    break

    def _check(self, request: GenerateRequest) -> None:
        num_prompt, budget = len(request.token_ids), request.sampling.max_tokens
        window = self._model.context_length
        if num_prompt == 0 or budget < 1:
            raise WorkerError(
                f"rollout: request '{request.id}' has {num_prompt} prompt tokens and max_tokens={budget}; both must be "
                "at least 1"
            )
        if window is not None and num_prompt + budget > window:
            raise ConfigError(
                f"rollout: request '{request.id}' has {num_prompt} prompt tokens and max_tokens={budget}, together "
                f"{num_prompt + budget}, but the model's window holds {window}; lower data.max_prompt_tokens or "
                "rollout.max_tokens (eval.max_tokens)"
            )
        highest = max(request.token_ids)
        if highest >= self._vocabulary or min(request.token_ids) < 0:
            raise WorkerError(
                f"rollout: request '{request.id}' holds the token id {highest}, but the model's vocabulary has "
                f"{self._vocabulary}; the tokenizer (model.tokenizer) belongs to another model"
            )

    @torch.no_grad()
    def _prefill(self, rows: list[Row]) -> "_Wave":
        """Compute each prompt of the wave once, and copy its cache to its rows."""
        requests = list({id(row.request): row.request for row in rows}.values())
        place = {id(request): index for index, request in enumerate(requests)}
        longest = max(len(request.token_ids) for request in requests)
        token_ids_PL = torch.zeros((len(requests), longest), dtype=torch.int64)
        valid_PL = torch.zeros((len(requests), longest), dtype=torch.bool)
        for index, request in enumerate(requests):
            token_ids_PL[index, longest - len(request.token_ids) :] = torch.tensor(request.token_ids)
            valid_PL[index, longest - len(request.token_ids) :] = True
        token_ids_PL, valid_PL = token_ids_PL.to(self._device), valid_PL.to(self._device)
        position_ids_PL = (valid_PL.cumsum(dim=1) - 1).clamp_(min=0)
        cache = GrowingCache()
        hidden_PLH = self._model.transformer.base_model(
            input_ids=token_ids_PL,
            attention_mask=valid_PL,
            position_ids=position_ids_PL,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        logits_PV = self._model.head.logits(hidden_PLH[:, -1])
        prompt_of_R = torch.tensor([place[id(row.request)] for row in rows], device=self._device)
        cache.take(prompt_of_R)
        return _Wave(
            rows=rows,
            cache=cache,
            valid_RL=valid_PL[prompt_of_R],
            positions_R=position_ids_PL[prompt_of_R, -1],
            logits_RV=logits_PV[prompt_of_R],
            settings=RowSampling.of([row.request.sampling for row in rows], self._vocabulary, self._device),
        )

    @torch.no_grad()
    def _advance(self, wave: "_Wave") -> list[Row]:
        """Draw the next token of every live row; the rows that ended with it."""
        places = [row.uniforms[min(len(row.token_ids), len(row.uniforms) - 1)] for row in wave.rows]
        token_R, logprob_R = draw(wave.logits_RV, wave.settings, np.array(places))
        wave.last_R = token_R
        ended = []
        for row, token, logprob in zip(wave.rows, token_R.tolist(), logprob_R.tolist(), strict=True):
            if row.finish is not None:
                continue
            if not np.isfinite(logprob):
                raise WorkerError(
                    f"rollout: request '{row.request.id}', sample {row.sample}: the logits after "
                    f"{len(row.request.token_ids) + len(row.token_ids)} tokens are not finite (log-prob {logprob}); "
                    "the weights have diverged: lower actor.lr or start from an earlier checkpoint"
                )
            row.token_ids.append(token)
            row.logprobs.append(logprob)
            row.finish = self._finish(row)
            if row.finish is not None:
                ended.append(row)
        return ended

    def _finish(self, row: Row) -> Finish | None:
        if row.token_ids[-1] in self._tokens.eos_ids or self._stopped(row):
            return Finish.STOP
        return Finish.LENGTH if len(row.token_ids) >= row.request.sampling.max_tokens else None

    def _stopped(self, row: Row) -> bool:
        """Whether a stop string is complete; a character has at most four bytes, and a token at least one."""
        stop = row.request.sampling.stop
        if not stop:
            return False
        tail = self._tokens.decode(row.token_ids[-4 * max(map(len, stop)) - 4 :])
        return any(each in tail for each in stop)

    @torch.no_grad()
    def _forward(self, wave: "_Wave") -> bool:
        """Feed the drawn tokens and compute the next logits; False when every row has ended."""
        if not wave.compact():
            return False
        wave.positions_R = wave.positions_R + 1
        wave.valid_RL = torch.cat([wave.valid_RL, torch.ones_like(wave.valid_RL[:, :1])], dim=1)
        hidden_R1H = self._model.transformer.base_model(
            input_ids=wave.last_R[:, None],
            attention_mask=wave.valid_RL,
            position_ids=wave.positions_R[:, None],
            past_key_values=wave.cache,
            use_cache=True,
        ).last_hidden_state
        wave.logits_RV = self._model.head.logits(hidden_R1H[:, -1])
        return True


@dataclass(eq=False)
class _Wave:
    """Rows that are decoded together. Ended rows stay, idle, until enough of them can be dropped at once."""

    rows: list[Row]
    cache: GrowingCache
    valid_RL: Tensor
    positions_R: Tensor
    """Position of the last token that was fed."""
    logits_RV: Tensor
    settings: RowSampling
    last_R: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """The tokens drawn last."""

    def compact(self) -> bool:
        """Drop ended rows if they are many; False when no row is left."""
        live = [index for index, row in enumerate(self.rows) if row.finish is None]
        if live and len(self.rows) - len(live) >= COMPACT_FRAC * len(self.rows):
            kept_R = torch.tensor(live, device=self.last_R.device)
            self.rows = [self.rows[index] for index in live]
            self.cache.take(kept_R)
            self.valid_RL, self.positions_R = self.valid_RL[kept_R], self.positions_R[kept_R]
            self.last_R, self.settings = self.last_R[kept_R], self.settings.take(kept_R)
        return bool(live)


def _completion(row: Row, version: int, generate_s: float) -> Completion:
    if row.finish is None:
        raise ValueError(f"row {row.request.id}/{row.sample} has not ended")
    return Completion(
        request_id=row.request.id,
        sample=row.sample,
        token_ids=np.array(row.token_ids, dtype=np.int32),
        logprobs=np.array(row.logprobs, dtype=np.float32),
        finish=row.finish,
        version=version,
        generate_s=generate_s,
    )
