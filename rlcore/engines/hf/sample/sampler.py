"""The embedded rollout: samples from the weights that are being trained, without a copy.

All calls of `generate` share one table of rows: finished rows leave at once, and waiting rows join in the order of
their request ids. Nothing runs in the background: a caller that waits for a completion computes the next token of all
rows, and then yields to the loop's other tasks.
"""

import asyncio
import bisect
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from rlcore.contracts.tokens import Tokens
from rlcore.engines.hf.sample.decode import Decoder
from rlcore.engines.hf.sample.decode_check import (
    check_decoding,
    check_kept_turns,
    check_shared_beginnings,
    rotates_by_length,
)
from rlcore.engines.hf.sample.decode_row import DecodeRow, renew_groups, rows_of
from rlcore.engines.hf.sample.sampling import RowSampling, draw
from rlcore.engines.hf.train.model import PolicyModel
from rlcore.errors import ConfigError, WorkerError
from rlcore.types import Completion, GenerateRequest

HELD_S = 0.002
"""Polling interval while sampling is paused."""


@dataclass(eq=False)
class _Call:
    """One call of `generate`."""

    number: int
    rows_left: int
    started: float
    finished: deque[Completion] = field(default_factory=deque)
    error: WorkerError | None = None


class EmbeddedSampler:
    """Generates with a policy model for concurrent callers; without open requests it only holds finished turns."""

    def __init__(
        self,
        model: PolicyModel,
        tokens: Tokens,
        *,
        max_rows: int,
        device: torch.device,
        version: Callable[[], int] = lambda: 0,
        may_sample: Callable[[], bool] = lambda: True,
        keeps_cache: bool = False,
        cached_tokens: int = 0,
        prompt_tokens: int | None = None,
    ) -> None:
        """`version`: the last published version; rows wait while `may_sample` returns False.

        `keeps_cache`: unfinished rows keep keys and values computed with older weights. `cached_tokens`: finished turns
        are kept for the next turns of their conversations until the weights change, while they and the slots of live
        rows have no more tokens. `prompt_tokens`: longest prompt that the plan has memory for; of longer ones, such as
        those of further turns, the tokens after it are computed with the row. None: no limit.

        ConfigError for a model that cannot be decoded this way.
        """
        self._model = model
        self._tokens = tokens
        self._max_rows = max_rows
        self._device = device
        self._version, self._may_sample, self._keeps_cache = version, may_sample, keeps_cache
        self._num_changes = 0
        self._vocabulary = model.head.linear.weight.shape[0]
        keeps_keys = not rotates_by_length(model)
        self._prompt_tokens = prompt_tokens if keeps_keys else None
        self._decoder = Decoder(model, max_rows, device, cached_tokens if keeps_keys else 0, self._prompt_tokens)
        self._waiting: list[DecodeRow] = []
        """Waiting rows in canonical order."""
        self._calls: dict[int, _Call] = {}
        self._num_calls = 0
        check_decoding(model, self._decoder, tokens)
        if keeps_keys:
            check_shared_beginnings(model, self._decoder, tokens)
            if cached_tokens:
                check_kept_turns(model, self._decoder, tokens)

    @property
    def rows(self) -> Sequence[DecodeRow]:
        """The rows that are being decoded."""
        return self._decoder.rows

    @property
    def num_waiting(self) -> int:
        """Number of rows that wait for a free slot."""
        return len(self._waiting)

    def weights_changed(self) -> None:
        """Must be called around every change of the weights; unfinished rows continue with the new ones.

        Cached values of the old weights are dropped and recomputed before the next token, which begins a new run of
        `Completion.versions`, under the old version if the change is not published by then. With `keeps_cache` rows
        that have begun keep their values, and the others compute their prompts with the new weights.
        """
        self._num_changes += 1
        self.forget_turns()
        if self._keeps_cache:
            self._decoder.drop_copies()
            renew_groups(self._waiting)
        else:
            self._decoder.forget()

    def forget_turns(self) -> None:
        """Free the keys and values of finished turns, such as before other work needs the memory."""
        self._decoder.kept.forget()

    async def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[Completion]:
        """Every completion of every request, each as it finishes; a reader that stops early frees the rows.

        ConfigError when a prompt and its response do not fit the window, WorkerError when logits are not numbers.
        """
        for request in requests:
            self._check(request)
        call = self._submit(requests)
        try:
            # Simultaneous calls are admitted together.
            await asyncio.sleep(0)
            while call.rows_left or call.finished:
                while call.finished:
                    yield call.finished.popleft()
                if call.error is not None:
                    raise call.error
                if call.rows_left and not self._may_sample():
                    await asyncio.sleep(HELD_S)
                elif call.rows_left:
                    self._step()
                    # Other calls of this worker's loop get their turn between two tokens.
                    await asyncio.sleep(0)
        finally:
            self._withdraw(call)

    def _submit(self, requests: Sequence[GenerateRequest]) -> _Call:
        self._num_calls += 1
        rows = [
            row for request in requests for row in rows_of(request, self._num_calls, self._tokens, self._prompt_tokens)
        ]
        call = _Call(self._num_calls, len(rows), time.monotonic())
        self._calls[call.number] = call
        for row in rows:
            bisect.insort(self._waiting, row, key=lambda waiter: waiter.order)
        return call

    def _withdraw(self, call: _Call) -> None:
        """Remove a call and its remaining rows."""
        self._calls.pop(call.number, None)
        for row in [waiter for waiter in self._waiting if waiter.call == call.number]:
            self._waiting.remove(row)
            row.group.rows_left -= 1
        self._decoder.leave([row for row in self._decoder.rows if row.call == call.number])
        if not self._calls:
            self._waiting.clear()
            self._decoder.release()

    def _step(self) -> None:
        """Admit as many waiting rows as fit, then decode one token of every live row."""
        done = False
        try:
            self._decoder.advance()
            free = self._max_rows - len(self._decoder.rows)
            if free and self._waiting:
                # Prompts in the cache first, or there could be more of them than rows.
                joining = sorted(self._waiting, key=lambda row: row.group.slot is None)[:free]
                chosen = set(joining)
                self._waiting = [row for row in self._waiting if row not in chosen]
                self._decoder.join(joining)
            self._sample()
            done = True
        finally:
            if not done:  # no row can continue from a half-finished step
                self._fail()

    def _sample(self) -> None:
        rows, version = self._decoder.rows, self._version()
        settings = RowSampling.of([row.request.sampling for row in rows], self._vocabulary, self._device)
        token_R, logprob_R = draw(self._decoder.logits(), settings, np.array([row.stream.random() for row in rows]))
        gone = []
        for row, token, logprob in zip(rows, token_R.tolist(), logprob_R.tolist(), strict=True):
            call = self._calls[row.call]
            try:
                row.append(token, logprob, version, self._num_changes)
            except WorkerError as error:
                call.error = call.error or error
                gone.append(row)
                continue
            if row.finish is not None:
                call.rows_left -= 1
                call.finished.append(row.completion(time.monotonic() - call.started))
                gone.append(row)
        self._decoder.leave(gone)

    def _fail(self) -> None:
        """Fail every call; the one that computed raises the error itself."""
        for call in self._calls.values():
            call.error = call.error or WorkerError("rollout: a pass shared with other requests failed")
        self._waiting.clear()
        self._decoder.release()
        self.forget_turns()

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
        self._tokens.check_stop(request.sampling.stop, f"rollout: stop strings of request '{request.id}'")
        unknown = next((id_ for id_ in request.token_ids if not 0 <= id_ < self._vocabulary), None)
        if unknown is not None:
            raise WorkerError(
                f"rollout: request '{request.id}' holds the token id {unknown}, but the model's vocabulary has "
                f"{self._vocabulary}; the tokenizer (model.tokenizer) belongs to another model"
            )
