"""The dynamic loss scale of float16, whose gradients would otherwise vanish below 6e-8 or overflow above 65504.

The loss is multiplied before the backward pass, gradients are divided in float32 afterwards (arXiv 1710.03740). A
gradient that overflows is recomputed with a lower scale, so the search for the scale does not cost mini-batches. All
scales are powers of two, so scaling does not round.
"""

from rlcore.types import Metrics

START = 16
"""Exponent of the first scale, 2^16."""
HIGHEST = 24
BACK_OFF = 4
"""Subtracted from the exponent after an overflow."""
GROW_AFTER = 100
"""Finite updates in a row after which the exponent grows by 1."""


class LossScale:
    """A scale of 2^exponent that falls when gradients overflow and grows while they do not; 1 if it is off."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self._exponent = self._before = START if enabled else 0
        self._since = 0
        self._retries = 0

    @property
    def value(self) -> float:
        """The factor on the loss."""
        return float(2.0**self._exponent)

    def begin(self) -> None:
        """Begin a new update."""
        self._before, self._retries = self._exponent, 0

    def lower(self) -> bool:
        """Lower the scale after an overflow; False if it is already 1, so the scale is not the cause."""
        if self._exponent == 0:
            return False
        self._exponent = max(0, self._exponent - BACK_OFF)
        self._since, self._retries = 0, self._retries + 1
        return True

    def succeeded(self) -> None:
        """Record an update with finite gradients."""
        self._since += 1
        if self.enabled and self._since >= GROW_AFTER:
            self._exponent, self._since = min(HIGHEST, self._exponent + 1), 0

    def failed(self) -> None:
        """Record a skipped update: no scale helped, so restore the scale at its start."""
        self._exponent, self._since = self._before, 0

    def metrics(self, name: str) -> Metrics:
        """'<name>/loss_scale' of the update, and '<name>/loss_scale_retries', the number of recomputations."""
        if not self.enabled:
            return {}
        return {f"{name}/loss_scale": self.value, f"{name}/loss_scale_retries": float(self._retries)}

    def counters(self) -> dict[str, int]:
        """The state that checkpoints keep; empty when the scale is off."""
        return {"loss_scale_exponent": self._exponent, "loss_scale_updates": self._since} if self.enabled else {}

    def restore(self, counters: dict[str, int]) -> None:
        """Continue from `counters`; start over if they belong to another number format."""
        if self.enabled:
            self._exponent = counters.get("loss_scale_exponent", START)
            self._since = counters.get("loss_scale_updates", 0)
