"""One sample while it is decoded, and the prompt that it shares with the other samples of its request."""

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from rlcore.contracts.stop_scan import StopScan
from rlcore.contracts.tokens import Tokens
from rlcore.engines.hf.sample.sampling import row_stream
from rlcore.errors import WorkerError
from rlcore.types import Completion, FinishReason, GenerateRequest


@dataclass(eq=False)
class DecodeGroup:
    """A request's prompt: computed once, held for as long as a sample of it is waiting or alive."""

    request: GenerateRequest
    rows_left: int
    """Samples that have not ended."""
    slot: int | None = None
    """Its place in the cache; None while nothing of it has been computed."""
    hidden_H: Tensor | None = None
    """The last hidden state of the prompt, from which each sample draws its first token."""


@dataclass(eq=False)
class DecodeRow:
    """One sample."""

    group: DecodeGroup
    sample: int
    call: int
    """Which call of `generate` waits for it."""
    stream: np.random.Generator
    """Gives the row's random numbers, one per token."""
    stop: StopScan
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    """(offset, version) of each run of tokens that the same weights sampled."""
    weights: tuple[int, int] | None = None
    """Which weights sampled the last token: their version, and how many changes led to them."""
    finish: FinishReason | None = None

    @property
    def request(self) -> GenerateRequest:
        """The request that it is a sample of."""
        return self.group.request

    @property
    def order(self) -> tuple[str, int, int]:
        """Its place in the canonical order."""
        return self.request.id, self.sample, self.call

    def take(self, token: int, logprob: float, weights: tuple[int, int], eos_ids: frozenset[int]) -> None:
        """One more token, which `weights` sampled; WorkerError when the logits were not numbers."""
        if not np.isfinite(logprob):
            raise WorkerError(
                f"rollout: request '{self.request.id}', sample {self.sample}: the logits after "
                f"{len(self.request.token_ids) + len(self.token_ids)} tokens are not finite (log-prob {logprob}); "
                "the weights have diverged: lower actor.lr or start from an earlier checkpoint"
            )
        if weights != self.weights:
            self.versions.append((len(self.token_ids), weights[0]))
            self.weights = weights
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        if token in eos_ids or self.stop.found(self.token_ids):
            self.finish = FinishReason.STOP
        elif len(self.token_ids) >= self.request.sampling.max_tokens:
            self.finish = FinishReason.LENGTH

    def completion(self, generate_s: float) -> Completion:
        """The finished completion; ValueError while the row is decoded."""
        if self.finish is None:
            raise ValueError(f"row {self.request.id}/{self.sample} has not ended")
        return Completion(
            request_id=self.request.id,
            sample=self.sample,
            token_ids=np.array(self.token_ids, dtype=np.int32),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            finish=self.finish,
            version=self.versions[0][1],
            generate_s=generate_s,
            versions=tuple(self.versions),
        )


def rows_of(request: GenerateRequest, call: int, tokens: Tokens) -> list[DecodeRow]:
    """The samples of a request, with nothing sampled yet."""
    group = DecodeGroup(request, rows_left=request.n)
    return [
        DecodeRow(
            group=group,
            sample=sample,
            call=call,
            stream=row_stream(request.seed, sample),
            stop=StopScan(request.sampling.stop, tokens.decode),
        )
        for sample in range(request.n)
    ]
