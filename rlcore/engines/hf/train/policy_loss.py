"""The actor's loss: the policy loss that the configuration names, a KL term and an entropy bonus."""

from collections.abc import Callable

import torch
from torch import Tensor

from rlcore.algo.importance import importance_factor
from rlcore.algo.kl import kl_loss, kl_penalty
from rlcore.algo.loss import PolicyLossInputs, PolicyLossOutput
from rlcore.config import AlgoConfig
from rlcore.engines.hf.train.microbatch import LossTerms, MicroBatch, Predictions
from rlcore.engines.hf.train.transfers import device_tensor
from rlcore.errors import CALLED, PluginError, boundary
from rlcore.types import Batch, Bools

METRIC_NAMES = {"ratio": "ratio_mean", "clipped_low": "clip_frac_low", "clipped_high": "clip_frac_high"}
"""The names under which a policy loss's metrics are logged, where they differ."""
DIFFERENCE = "policy/rollout_logprob_diff"
"""|log pi_old - log mu| over tokens that both computed with the same weights: the difference between sampler and
trainer."""


def taught_rows(batch: Batch) -> Bools:
    """(B,) True for rows that have a weight and, at one loss token or more, an advantage that is not 0.

    The others add nothing to the gradient if the loss is only a policy loss that ignores zero advantages
    (`Algorithm.ignores_zero_advantages`). ValueError if the batch has no advantages.
    """
    if batch.advantages_BT is not None:
        has_advantage_B = ((batch.advantages_BT != 0) & batch.tokens.loss_mask_BT).any(axis=1)
    elif batch.advantages_B is not None:
        has_advantage_B = batch.advantages_B != 0
    else:
        raise ValueError("the mini-batch has no advantages")
    taught_B: Bools = has_advantage_B if batch.weights_B is None else has_advantage_B & (batch.weights_B != 0)
    return taught_B


class PolicyLoss:
    """rho * policy_loss + kl.coef * kl - entropy_coef * entropy, token by token.

    All three are aggregated with the same weights. The KL term is used only with `algo.kl.placement=loss`; 'policy/kl'
    is logged whenever the batch has log-probs of the reference. rho is the importance factor of
    `rlcore.algo.importance`, used only if the sampler differs from the trainer. 'policy/rollout_logprob_diff' is always
    logged; if pi_old is mu or pi itself, only in updates of the weights that sampled.
    """

    weights_sampled: bool = True
    """True while the weights are the published ones, which no update has changed."""

    def __init__(
        self,
        policy_loss: Callable[[PolicyLossInputs], PolicyLossOutput],
        config: AlgoConfig,
        sampler_differs: bool = False,
    ) -> None:
        """`sampler_differs`: the recorded log-probs are not those of pi_old, so the factor pi_old / mu applies."""
        self._policy_loss = policy_loss
        self._config = config
        self._corrects = sampler_differs

    def __call__(self, micro: MicroBatch, predictions: Predictions) -> LossTerms:
        """The loss of each token and the policy's metrics."""
        logprobs_BT, old = predictions.scores_BT, micro.batch.old_logprobs_BT
        selected = micro.batch.selected_BT
        inputs = PolicyLossInputs(
            logprobs_BT=logprobs_BT,
            old_logprobs_BT=logprobs_BT.detach() if old is None else micro.per_token(old),
            advantages_BT=micro.advantages_BT,
            mask_BT=micro.mask_BT,
            config=self._config,
            selected_BT=None if selected is None else micro.per_token(selected),
        )
        output = self._called(inputs)
        metrics: dict[str, Tensor] = {
            f"policy/{METRIC_NAMES.get(name, name)}": value for name, value in output.metrics.items()
        }
        if "ratio" in output.metrics:
            metrics["policy/ratio_max"] = output.metrics["ratio"]
        metrics["policy/entropy"] = predictions.entropy_BT
        counted: dict[str, Tensor] = {}
        loss_BT = output.loss_BT
        rollout_BT = device_tensor(micro.batch.tokens.rollout_logprobs_BT, micro.device)
        if self._corrects:
            factor_BT, importance = importance_factor(
                inputs.old_logprobs_BT, rollout_BT, micro.mask_BT, self._config.importance
            )
            loss_BT = loss_BT * factor_BT
            metrics |= {f"policy/{name}": value_BT for name, value_BT in importance.items()}
        if self._corrects or self.weights_sampled:
            trainer_BT = inputs.old_logprobs_BT if self._corrects else logprobs_BT
            metrics[DIFFERENCE] = (trainer_BT.detach() - rollout_BT).abs()
            if micro.batch.same_weights_BT is not None:
                counted[DIFFERENCE] = micro.per_token(micro.batch.same_weights_BT)
        if self._config.entropy_coef:
            loss_BT = loss_BT - self._config.entropy_coef * predictions.entropy_BT
        if micro.batch.reference_logprobs_BT is not None:
            reference_BT = micro.per_token(micro.batch.reference_logprobs_BT)
            # Masked first: values at other tokens may overflow k3's exponential, and inf * 0 is NaN.
            kl_BT = kl_penalty(
                torch.where(micro.mask_BT, logprobs_BT, 0.0),
                torch.where(micro.mask_BT, reference_BT, 0.0),
                self._config.kl.estimator,
            )
            metrics["policy/kl"] = kl_BT
            if self._config.kl.placement == "loss":
                if self._config.kl.unbiased:
                    old_BT = torch.where(micro.mask_BT, inputs.old_logprobs_BT, logprobs_BT.detach())
                    kl_BT = kl_loss(kl_BT, logprobs_BT, old_BT)
                loss_BT = loss_BT + self._config.kl.coef * kl_BT
        elif self._config.kl.placement == "loss":
            raise ValueError("algo.kl.placement=loss: the mini-batch has no log-probs of the reference")
        return LossTerms(loss_BT, metrics, counted)

    def _called(self, inputs: PolicyLossInputs) -> PolicyLossOutput:
        """The output of the policy loss; PluginError with its name if it raised or if a shape is wrong."""
        who, shape = f"algo.policy_loss={self._config.policy_loss}", tuple(inputs.mask_BT.shape)
        with boundary(who, PluginError, CALLED):
            output = self._policy_loss(inputs)
        for name, found_BT in {**output.metrics, "loss_BT": output.loss_BT}.items():
            if found_BT.shape != shape:
                raise PluginError(f"{who} returned {name} of shape {tuple(found_BT.shape)}; needs {shape}")
        return output
