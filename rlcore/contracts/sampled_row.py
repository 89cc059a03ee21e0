"""A sample during generation: tokens come one by one and form a completion at the end."""

import numpy as np

from rlcore.contracts.stop_scan import StopScan
from rlcore.contracts.tokens import Tokens
from rlcore.errors import WorkerError
from rlcore.types import Completion, FinishReason, GenerateRequest


class SampledRow:
    """One sample of a request. Every rollout engine that uses it ends rows at the same tokens."""

    def __init__(self, request: GenerateRequest, sample: int, tokens: Tokens) -> None:
        self.request, self.sample = request, sample
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[tuple[int, int]] = []
        """(offset, version) of each run of tokens that the same weights sampled."""
        self.finish: FinishReason | None = None
        """None while more tokens are needed."""
        self._weights: tuple[int, int] | None = None
        self.eos_ids = tokens.eos_ids
        self._stop = StopScan(request.sampling.stop, tokens.decode)

    def append(self, token: int, logprob: float, version: int, num_changes: int = 0) -> None:
        """Add a token and its log-prob.

        `version` is that of the weights that sampled the token; `num_changes` counts how often they have changed. The
        row ends at a token that ends a turn, at one that completes a stop string, and at the last allowed token.
        WorkerError when the log-prob is not a finite number.
        """
        if not np.isfinite(logprob):
            raise WorkerError(
                f"rollout: request '{self.request.id}', sample {self.sample}: the logits after "
                f"{len(self.request.token_ids) + len(self.token_ids)} tokens are not finite (log-prob {logprob}); "
                "the weights have diverged: lower actor.lr or start from an earlier checkpoint"
            )
        if self._weights != (version, num_changes):
            self.versions.append((len(self.token_ids), version))
            self._weights = (version, num_changes)
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        if token in self.eos_ids or self._stop.found(self.token_ids):
            self.finish = FinishReason.STOP
        elif len(self.token_ids) >= self.request.sampling.max_tokens:
            self.finish = FinishReason.LENGTH

    def completion(self, generate_s: float) -> Completion:
        """The finished completion; ValueError while more tokens are needed."""
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
