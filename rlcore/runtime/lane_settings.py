"""The rollout service as the run's agent loop gets it: it samples only with the settings that the loop was given."""

from collections.abc import AsyncIterator, Sequence

from rlcore.contracts.rollout import Generator
from rlcore.errors import PluginError
from rlcore.types import Completion, GenerateRequest, Lane, Sampling

_Settings = tuple[float, float, int, float]
"""The fields of `Sampling` that decide the distribution. A turn may have fewer tokens and more stop strings."""
_NAMES = ("temperature", "top_p", "top_k", "min_p")


class LaneSettings:
    """Forwards requests that have the settings of a rollout in their lane, and refuses all other requests.

    No later check finds such a request: an evaluation records no log-probs of the actor to compare with, and in half
    precision the bound on differences is wide.
    """

    def __init__(self, generator: Generator, who: str) -> None:
        """`who`: the agent loop in errors."""
        self._generator, self._who = generator, who
        self._by_lane: dict[Lane, set[_Settings]] = {}
        """By lane, of every rollout so far; greedy baselines share the lane of training."""

    def record(self, sampling: Sampling, lane: Lane) -> None:
        """Record the arguments of a rollout."""
        self._by_lane.setdefault(lane, set()).add(_settings(sampling))

    def generate(self, requests: Sequence[GenerateRequest], lane: Lane) -> AsyncIterator[Completion]:
        """See `Generator.generate`. PluginError for a request with other settings."""
        known = self._by_lane.get(lane, ())
        for request in requests:
            wanted = request.sampling  # compared here, because a call per request is measured
            if (wanted.temperature, wanted.top_p, wanted.top_k, wanted.min_p) not in known:
                raise PluginError(self._refusal(request, lane))
        return self._generator.generate(requests, lane)

    def _refusal(self, request: GenerateRequest, lane: Lane) -> str:
        needed = " or ".join(_in_words(settings) for settings in sorted(self._by_lane.get(lane, ())))
        return (
            f"{self._who}: rollout(): request '{request.id}' in the lane '{lane}' has "
            f"{_in_words(_settings(request.sampling))}; needs {needed or 'another lane: no rollout has this one'}; "
            "pass on the `lane` and the `sampling` of rollout(), where only `max_tokens` and `stop` may be replaced"
        )


def _settings(sampling: Sampling) -> _Settings:
    return sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p


def _in_words(settings: _Settings) -> str:
    return ", ".join(f"{name}={value:g}" for name, value in zip(_NAMES, settings, strict=True))
