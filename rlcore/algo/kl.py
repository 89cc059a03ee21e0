"""KL divergence from the reference policy: estimates per token, and the controllers of its coefficient."""

import math
from typing import Any, Literal, assert_never

from torch import Tensor

from rlcore.config import KlConfig
from rlcore.errors import CheckpointError


def kl_penalty(logprobs_BT: Tensor, reference_BT: Tensor, kind: Literal["k1", "k2", "k3"]) -> Tensor:
    """(B, T) estimates of KL(policy || reference) from tokens that the policy sampled; not masked.

    With d = logprobs - reference: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d (http://joschu.net/blog/kl-approx.html;
    k3 is the term of arXiv 2402.03300, eq. 4). k1 and k3 are unbiased estimates of the *value*, k2 is biased.

    In a term of the loss the expected *gradient* counts instead. For tokens sampled on policy:
    k1 has gradient 0 whatever the divergence, so it adds only noise. k2 has the gradient of KL(policy || reference).
    k3 has that of the *other* direction, KL(reference || policy); the two are equal to first order while the policies
    are close. k3's sampled gradient (1 - exp(-d)) grows exponentially where the policy gives a token far less
    probability than the reference: far from the reference a few tokens can dominate the step, and k2 is safer.
    With `algo.kl.unbiased` see `kl_loss`. In the reward no gradient passes through, and k1 is the unbiased choice.
    """
    difference_BT = logprobs_BT - reference_BT
    if kind == "k1":
        return difference_BT
    if kind == "k2":
        return difference_BT.square() / 2.0
    if kind == "k3":
        return (-difference_BT).expm1() + difference_BT
    assert_never(kind)


def kl_loss(kl_BT: Tensor, logprobs_BT: Tensor, old_logprobs_BT: Tensor) -> Tensor:
    """(B, T) the estimates of `kl_penalty` times pi / pi_old, whose expectation over samples of pi_old is that over pi.

    For k1 and k3, whose expectation over pi is KL(policy || reference), the expected gradient is that of the
    divergence (DeepSeek-V3.2, arXiv 2512.02556), on policy, too. k2 has that gradient without the factor.
    """
    return kl_BT * (logprobs_BT - old_logprobs_BT).exp()


class FixedKl:
    """A constant coefficient."""

    def __init__(self, coef: float) -> None:
        self.coef = coef

    def observe(self, total: float, num_samples: int) -> None:
        """Add a mini-batch of the current step: the KL in nats of all its samples together."""

    def end_step(self) -> None:
        """Set the coefficient of the next step."""

    def state(self) -> dict[str, Any]:
        """State for checkpoints, as JSON."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned; a fixed coefficient stays that of the configuration."""


class AdaptiveKl(FixedKl):
    """A coefficient that steers KL towards a target (arXiv 1909.08593, section 2.2)."""

    def __init__(self, coef: float, target: float, horizon: int) -> None:
        super().__init__(coef)
        self.target = target
        self.horizon = horizon
        self._total, self._num_samples = 0.0, 0
        """Of the current step, which starts again after a resume: checkpoints keep neither."""

    def observe(self, total: float, num_samples: int) -> None:
        self._total += total
        self._num_samples += num_samples

    def end_step(self) -> None:
        """Multiply the coefficient by 1 + clamp(kl / target - 1, -0.2, 0.2) * num_samples / horizon.

        kl is the mean per sample of what the step observed. num_samples counts as the horizon at most, so one step
        changes the coefficient by at most a fifth, however many mini-batches it has. A KL that is not finite changes
        nothing.
        """
        kl, num_samples = self._total / max(1, self._num_samples), self._num_samples
        self._total, self._num_samples = 0.0, 0
        if not math.isfinite(kl):
            return
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        self.coef *= 1.0 + error * min(num_samples / self.horizon, 1.0)

    def state(self) -> dict[str, Any]:
        return {"coef": self.coef}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned; CheckpointError when it holds no coefficient."""
        coef = state.get("coef")
        if not isinstance(coef, (int, float)):
            raise CheckpointError(
                f"KL controller: state holds {sorted(state)}; needs 'coef'; choose the checkpoint's algo.kl.controller"
            )
        self.coef = float(coef)


def kl_controller(config: KlConfig) -> FixedKl:
    """The controller that the configuration chooses."""
    if config.controller == "adaptive":
        return AdaptiveKl(config.coef, config.target, config.horizon)
    return FixedKl(config.coef)
