"""The suite of policy losses."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlcore.algo.covariance import SelectionInputs
from rlcore.algo.loss import PolicyLossInputs, PolicyLossOutput
from rlcore.config import AlgoConfig
from rlcore.contracts.offers import AlgorithmKind
from rlcore.imports import import_function
from rlcore.testing.suites.algorithm import AlgorithmSuite
from rlcore.testing.suites.harness import extra

ROWS, LENGTH = 4, 7
STEP = 1e-5
"""Step of a finite difference, in float64."""


class PolicyLossSuite(AlgorithmSuite):
    """A policy loss; `algo` holds the settings of the section `algo` that it reads."""

    kind = AlgorithmKind.POLICY_LOSS
    algo: Mapping[str, Any] = {}
    is_its_own_gradient: bool = True
    """Claim: the gradient is that of the value. Set it to False if the loss detaches a factor on purpose."""
    on_policy_factor: float = 1.0
    """The gradient on policy is this times -A; 0: it is a different one."""

    def inputs(self, dtype: torch.dtype = torch.float64, spread: float = 0.15) -> PolicyLossInputs:
        """Four rows, one of which has no loss token; log-ratios of about `spread`, one advantage per row."""
        draw = torch.Generator().manual_seed(self.seed)
        old_BT = -torch.rand(ROWS, LENGTH, generator=draw, dtype=dtype) - 0.1
        off_BT = spread * torch.randn(ROWS, LENGTH, generator=draw, dtype=dtype)
        mask_BT = torch.rand(ROWS, LENGTH, generator=draw) < 0.6
        mask_BT[:, 0], mask_BT[:, 2], mask_BT[3] = False, True, False
        advantages_BT = torch.tensor([1.5, -0.7, 0.4, 1.0], dtype=dtype)[:, None].expand(ROWS, LENGTH).clone()
        logprobs_BT = (old_BT + off_BT).requires_grad_()
        loss_inputs = PolicyLossInputs(logprobs_BT, old_BT, advantages_BT, mask_BT, AlgoConfig(**self.algo))
        return replace(loss_inputs, selected_BT=self._selected(loss_inputs))

    def _selected(self, loss_inputs: PolicyLossInputs) -> Tensor | None:
        chosen = self.offer().selection
        if not chosen:
            return None
        select = self.selection if callable(self.selection) else import_function(chosen)
        seen = SelectionInputs(
            loss_inputs.old_logprobs_BT, loss_inputs.advantages_BT, loss_inputs.mask_BT, 0, loss_inputs.config
        )
        found = select(seen)
        good = isinstance(found, Tensor) and found.dtype is torch.bool and found.shape == loss_inputs.mask_BT.shape
        self.need(good, f"its selection returned {found!r:.60}; needs a bool tensor of shape (B, T)")
        self.need(not bool((found & ~loss_inputs.mask_BT).any()), "its selection picks tokens that have no loss")
        selected: Tensor = found
        return selected

    def output(self, inputs: PolicyLossInputs) -> PolicyLossOutput:
        """The function's result, after the checks of shape and finiteness."""
        found = self.function()(inputs)
        self.need(isinstance(found, PolicyLossOutput), f"returned {type(found).__name__}; needs PolicyLossOutput")
        self.need_tensor("loss_BT", found.loss_BT, tuple(inputs.mask_BT.shape))
        output: PolicyLossOutput = found
        return output

    def gradient(self, inputs: PolicyLossInputs) -> Tensor:
        """(B, T) gradient of the sum of the losses."""
        loss_BT = self.output(inputs).loss_BT
        self.need(loss_BT.requires_grad, "the loss does not depend on logprobs_BT; needs a gradient")
        (gradient_BT,) = torch.autograd.grad(loss_BT.sum(), inputs.logprobs_BT)
        return gradient_BT

    def test_a_loss_is_one_number_a_token(self) -> None:
        """Losses are (B, T), finite, have a gradient, and are 0 outside the mask."""
        inputs = self.inputs(torch.float32)
        loss_BT = self.output(inputs).loss_BT
        self.need(not bool(loss_BT[~inputs.mask_BT].any()), "a token without a loss has one; needs 0 outside the mask")
        self.need(bool(self.gradient(inputs)[inputs.mask_BT].any()), "no token has a gradient")

    def test_metrics_are_numbers_of_tokens(self) -> None:
        """Metrics are (B, T), finite, detached, and 0 outside the mask."""
        inputs = self.inputs(torch.float32)
        for name, value_BT in self.output(inputs).metrics.items():
            self.need_tensor(f"metric '{name}'", value_BT, tuple(inputs.mask_BT.shape))
            self.need(not value_BT.requires_grad, f"metric '{name}' is not detached")
            self.need(not bool(value_BT[~inputs.mask_BT].any()), f"metric '{name}' is not 0 outside the mask")

    def test_masked_tokens_have_no_gradient(self) -> None:
        """Any value there is ignored, also -inf and NaN."""
        inputs = self.inputs()
        clean_BT = self.gradient(inputs)
        for value in (float("-inf"), float("nan")):
            spoilt: dict[str, Any] = {
                name: torch.where(inputs.mask_BT, getattr(inputs, name).detach(), value)
                for name in ("logprobs_BT", "old_logprobs_BT", "advantages_BT")
            }
            spoilt["logprobs_BT"].requires_grad_()
            found_BT = self.gradient(replace(inputs, **spoilt))
            outside = found_BT[~inputs.mask_BT]
            self.need(bool((outside == 0).all()), f"tokens without a loss that hold {value} have a gradient; needs 0")
            self.need_equal(f"{value} at tokens without a loss", clean_BT, found_BT)

    @extra("on_policy_factor")
    def test_on_policy_it_is_the_policy_gradient(self) -> None:
        """At ratio 1 the gradient is `on_policy_factor` times -A, and the metric 'ratio' is 1."""
        inputs = self.inputs()
        inputs = replace(inputs, old_logprobs_BT=inputs.logprobs_BT.detach())
        if inputs.selected_BT is not None:
            inputs = replace(inputs, selected_BT=torch.zeros_like(inputs.mask_BT))
        due_BT = torch.where(inputs.mask_BT, -self.on_policy_factor * inputs.advantages_BT, 0.0)
        self.need_equal("the gradient at ratio 1, against -A", due_BT, self.gradient(inputs))
        ratio_BT = self.output(inputs).metrics.get("ratio")
        if ratio_BT is not None:
            self.need_equal("the metric 'ratio' at ratio 1", inputs.mask_BT.to(ratio_BT.dtype), ratio_BT)

    @extra("is_its_own_gradient")
    def test_the_gradient_is_that_of_the_value(self) -> None:
        """Compares it with finite differences of the sum of the losses, in float64."""
        inputs = self.inputs()
        found_BT = self.gradient(inputs)
        for row, place in inputs.mask_BT.nonzero().tolist():
            sides = []
            for sign in (1.0, -1.0):
                moved_BT = inputs.logprobs_BT.detach().clone()
                moved_BT[row, place] += sign * STEP
                sides.append(float(self.function()(replace(inputs, logprobs_BT=moved_BT)).loss_BT.sum()))
            slope, autograd_slope = (sides[0] - sides[1]) / (2 * STEP), float(found_BT[row, place])
            good = abs(slope - autograd_slope) <= 1e-4 * max(1.0, abs(slope))
            self.need(good, f"the gradient of a token is {autograd_slope:g}, a finite difference {slope:g}")

    def test_extremes_are_no_nan(self) -> None:
        """Tests log-ratios of 30 and -30 and advantages of 1000 and 0, in float32."""
        inputs = self.inputs(torch.float32)
        for ratio in (30.0, -30.0):
            for size in (1000.0, 0.0):
                logprobs_BT = torch.full((ROWS, LENGTH), -31.0 if ratio < 0 else -1.0)
                moved = replace(
                    inputs,
                    logprobs_BT=logprobs_BT.requires_grad_(),
                    old_logprobs_BT=logprobs_BT.detach() - ratio,
                    advantages_BT=inputs.advantages_BT * size,
                )
                found_BT = self.gradient(moved)
                bad = bool(torch.isnan(found_BT).any())
                self.need(not bad, f"the gradient is NaN at log-ratio {ratio:g} and advantages times {size:g}")

    def test_rows_do_not_depend_on_each_other(self) -> None:
        """They do not depend on padding either: any split into micro-batches gives the same losses."""
        inputs = self.inputs()
        whole_BT = self.output(inputs).loss_BT.detach()
        for rows in ([2], [3, 0]):
            found_BT = self.output(part_of(inputs, rows, LENGTH)).loss_BT.detach()
            self.need_equal(f"rows {rows} alone", whole_BT[rows], found_BT)
        longer = part_of(inputs, list(range(ROWS)), LENGTH + 3)
        self.need_equal("with more padding", whole_BT, self.output(longer).loss_BT.detach()[:, :LENGTH])


def part_of(inputs: PolicyLossInputs, rows: list[int], length: int) -> PolicyLossInputs:
    """These rows, padded to a length."""
    moved: dict[str, Any] = {
        name: torch.nn.functional.pad(tensor.detach()[rows], (0, length - LENGTH))
        for name, tensor in vars(inputs).items()
        if isinstance(tensor, Tensor)
    }
    moved["logprobs_BT"].requires_grad_()
    return replace(inputs, **moved)
