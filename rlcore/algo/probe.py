"""Calls an algorithm on a small batch before anything is sampled and compares its result with its offer.

The batch has the special cases of a real one: rewards that differ, equal rewards, a group with one sample left, a
sample in two rows, tokens in the middle of a row that the policy did not sample, padding, rows without a loss token.
Shape letters are those of `rlcore.types`.
"""

import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlcore.algo.advantage import AdvantageInputs
from rlcore.algo.covariance import SelectionInputs
from rlcore.algo.loss import RESERVED_METRICS, PolicyLossInputs, PolicyLossOutput
from rlcore.algo.token_rewards import token_rewards
from rlcore.algo.torch_state import unchanged_torch
from rlcore.config import AlgoConfig
from rlcore.contracts.offers import Algorithm, AlgorithmKind, Need
from rlcore.errors import CALLED, PluginError, boundary
from rlcore.errors.checks.results import kind
from rlcore.imports import import_function
from rlcore.plan.components import check_arguments

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_GROUP_B = (0, 0, 0, 0, 1, 1, 2)
_SAMPLE_B = (0, 1, 1, 2, 3, 4, 5)
"""Sample 1 has two rows; group 1 has equal rewards, group 2 one sample."""
_EQUAL = "in a group of equal rewards"
_ABOUT_B = ("", "", "", "", _EQUAL, _EQUAL, "the only sample left in its group")
_SCORES_BF = (
    (0.0, math.nan),
    (1.0, 0.5),
    (1.0, 0.5),
    (0.5, -1.0),
    (1.0, 0.0),
    (1.0, 0.25),
    (0.25, math.nan),
)
"""Scores of two functions, of which the second skips two samples."""
_WEIGHTS_F = (1.0, 0.5)
_REWARDS_B = (0.0, 1.0, 1.0, 0.5, 1.0, 1.0, 0.25)
_MASK_BT = ("..xxx...", "..xx..xx", ".....xx.", "..x.x.x.", "..xxxxxx", "..x.....", "..xx....")
"""x: the policy sampled the token."""
_LOSS_MASK_BT = ("..xxx...", "..xx..xx", ".....xx.", "........")
"""Rows of a micro-batch; the last one is left out of the loss."""


@dataclass(frozen=True)
class Probed:
    """The functions of an algorithm that passed the probe."""

    function: Callable[..., Any]
    """With the extra arguments of the run."""
    selection: Callable[..., Any] | None = None
    """For a policy loss that uses whole mini-batches."""


def probe(algorithm: Algorithm, provided_by: str, config: AlgoConfig | None = None) -> Probed:
    """Import an algorithm and call it on a small batch, with the settings of the run or the defaults.

    PluginError, naming `provided_by`, the algorithm and the key that chooses it, for: an import that fails, an
    exception, other parameters, a change of torch's global state, or a wrong result. A result is a finite
    floating-point tensor of the declared shape, 0 where nothing was sampled; that of a policy loss has a gradient with
    respect to the log-probs. ConfigError for an extra argument of the run that the function does not take.
    """
    config = config or AlgoConfig()
    who = f"algo.{algorithm.kind.value}={algorithm.name} of {provided_by}"
    function = _resolved(algorithm.target, who)
    if algorithm.kind is AlgorithmKind.ADVANTAGE:
        function = _with_arguments(function, config.advantage_kwargs, "algo.advantage_kwargs", who)
        _probe_estimator(function, algorithm, who, config)
        return Probed(function)
    function = _with_arguments(function, config.policy_loss_kwargs, "algo.policy_loss_kwargs", who)
    selection = _resolved(algorithm.selection, f"{who}: selection") if algorithm.selection else None
    _probe_loss(function, selection, who, config, algorithm.ignores_zero_advantages)
    return Probed(function, selection)


def checked_advantages(who: str, found: Any, per_token: bool, shape: torch.Size, about_B: Sequence[str] = ()) -> Tensor:
    """An estimator's result for a batch of shape (B, T), in float32; PluginError unless it can be trained on.

    It must be a floating-point tensor of shape (B,), or (B, T) if it is `per_token`, finite and without a gradient.
    `about_B` describes special rows in errors.
    """
    declared = "one per token, as its offer says (per_token=True)" if per_token else "one per row (per_token=False)"
    advantages = finite_tensor(f"{who} returned", found, shape if per_token else shape[:1], declared, about_B)
    if advantages.requires_grad:
        raise PluginError(f"{who} returned a tensor that requires a gradient; needs advantages, which are constants")
    return advantages.float()


def finite_tensor(who: str, found: Any, shape: torch.Size, declared: str, about_B: Sequence[str] = ()) -> Tensor:
    """A finite floating-point tensor of that shape; PluginError that begins with `who` for anything else."""
    needed = f"needs a floating-point tensor of shape {tuple(shape)}, {declared}"
    if not isinstance(found, Tensor) or found.shape != shape or not found.dtype.is_floating_point:
        raise PluginError(f"{who} {_described(found)}; {needed}")
    finite = found.isfinite()
    if not bool(finite.all()):
        first = (~finite).nonzero()[0].tolist()
        place = f"row {first[0]}" + (f", token {first[1]}" if len(first) > 1 else "")
        place += f", {about_B[first[0]]}" if about_B and about_B[first[0]] else ""
        raise PluginError(f"{who} {found[tuple(first)].item()} for {place}; {needed}, finite ones")
    return found


def _resolved(target: str, who: str) -> Callable[..., Any]:
    with unchanged_torch(f"{who}: importing it"):
        try:
            return import_function(target)
        except PluginError as error:
            raise PluginError(f"{who}: {error}") from error


def _with_arguments(
    function: Callable[..., Any], arguments: Mapping[str, Any], key: str, who: str
) -> Callable[..., Any]:
    """The function with the run's extra arguments; ConfigError for one that it does not take."""
    if not arguments:
        return function
    parameters = list(inspect.signature(function).parameters.values())[1:]
    names = [parameter.name for parameter in parameters if parameter.kind in _BY_NAME]
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    if not takes_any:
        check_arguments(key, who, arguments, names)
    return partial(function, **arguments)


def _probe_estimator(function: Callable[..., Any], algorithm: Algorithm, who: str, config: AlgoConfig) -> None:
    mask_BT, sample_B = _mask(_MASK_BT), torch.tensor(_SAMPLE_B)
    rewards_B = torch.tensor(_REWARDS_B)
    values_BT = torch.linspace(-0.5, 0.5, mask_BT.numel()).reshape(mask_BT.shape) * mask_BT
    inputs = AdvantageInputs(
        rewards_B=rewards_B,
        group_B=torch.tensor(_GROUP_B),
        sample_B=sample_B,
        lengths_B=mask_BT.sum(1),
        loss_mask_BT=mask_BT,
        token_rewards_BT=token_rewards(rewards_B, sample_B, mask_BT) if algorithm.per_token else None,
        values_BT=values_BT if Need.VALUES in algorithm.needs else None,
        gamma=config.gamma,
        lam=config.lam,
        baseline_B=torch.full_like(rewards_B, 0.5) if Need.GREEDY_BASELINE in algorithm.needs else None,
        pass_k=config.pass_k,
        scores_BF=torch.tensor(_SCORES_BF) if Need.FUNCTION_SCORES in algorithm.needs else None,
        weights_F=torch.tensor(_WEIGHTS_F) if Need.FUNCTION_SCORES in algorithm.needs else None,
    )
    who = f"{who}: probed on 7 rows of 3 groups, it"
    found = _called(function, inputs, who)
    with boundary(who, PluginError):
        advantages = checked_advantages(who, found, algorithm.per_token, mask_BT.shape, _ABOUT_B)
        if algorithm.per_token:
            _check_zero(f"{who} returned", advantages, mask_BT)
        elif bool(advantages[1] != advantages[2]):
            raise PluginError(f"{who} gave two rows of one sample different advantages; needs one number per sample")


def _probe_loss(
    function: Callable[..., Any],
    selection: Callable[..., Any] | None,
    who: str,
    config: AlgoConfig,
    ignores_zero_advantages: bool,
) -> None:
    mask_BT = _mask(_LOSS_MASK_BT)
    logprobs_BT = -torch.linspace(0.1, 2.0, mask_BT.numel()).reshape(mask_BT.shape)
    advantages_BT = torch.tensor([1.5, -0.5, -0.5, 0.0])[:, None].expand_as(mask_BT)
    selected_BT = None
    if selection is not None:
        selected_BT = _probe_selection(selection, who, SelectionInputs(logprobs_BT, advantages_BT, mask_BT, 0, config))
    logprobs_BT.requires_grad_()
    inputs = PolicyLossInputs(
        logprobs_BT=logprobs_BT,
        old_logprobs_BT=logprobs_BT.detach() * 1.1,
        advantages_BT=advantages_BT,
        mask_BT=mask_BT,
        config=config,
        selected_BT=selected_BT,
    )
    who = f"{who}: probed on 4 rows, it"
    output = _called(function, inputs, who)
    if not isinstance(output, PolicyLossOutput):
        raise PluginError(f"{who} returned {_described(output)}; needs rlcore.algo.loss.PolicyLossOutput")
    with boundary(who, PluginError):
        _check_loss(who, output, mask_BT, logprobs_BT)
    if ignores_zero_advantages:
        _check_without_advantages(function, replace(inputs, advantages_BT=torch.zeros_like(advantages_BT)), who)


def _check_without_advantages(function: Callable[..., Any], inputs: PolicyLossInputs, who: str) -> None:
    """PluginError unless loss and gradient are 0, as the offer's `ignores_zero_advantages` says."""
    loss_BT = _called(function, inputs, who).loss_BT
    gradient_BT = torch.zeros_like(loss_BT)
    if loss_BT.requires_grad:
        (gradient_BT,) = torch.autograd.grad(loss_BT.sum(), inputs.logprobs_BT)
    for what, values_BT in (("a loss", loss_BT.detach()), ("a gradient", gradient_BT)):
        if bool(values_BT.any()):
            row, token = values_BT.nonzero()[0].tolist()
            raise PluginError(
                f"{who} returned {what} of {values_BT[row, token].item():g} for row {row}, token {token}, whose "
                "advantages are all 0; needs 0 there, or an offer without ignores_zero_advantages"
            )


def _check_loss(who: str, output: PolicyLossOutput, mask_BT: Tensor, logprobs_BT: Tensor) -> None:
    loss_BT = finite_tensor(f"{who} returned loss_BT:", output.loss_BT, mask_BT.shape, "one per token")
    _check_zero(f"{who} returned loss_BT:", loss_BT, mask_BT)
    if not loss_BT.requires_grad:
        raise PluginError(f"{who} returned a loss that does not depend on logprobs_BT; needs a gradient")
    (gradient_BT,) = torch.autograd.grad(loss_BT.sum(), logprobs_BT, allow_unused=True)
    if gradient_BT is None or not bool(gradient_BT.isfinite().all()):
        found = "no gradient" if gradient_BT is None else "a gradient that is not finite"
        raise PluginError(f"{who} returned a loss with {found} with respect to logprobs_BT; needs a finite one")
    if not isinstance(output.metrics, Mapping):
        raise PluginError(f"{who} returned metrics that are {kind(output.metrics)}; needs a mapping of str to tensors")
    for name, values_BT in output.metrics.items():
        if not isinstance(name, str) or not isinstance(values_BT, Tensor) or values_BT.shape != mask_BT.shape:
            raise PluginError(
                f"{who} returned the metric {name!r}, which is {_described(values_BT)}; needs (B, T) numbers"
            )
        if values_BT.requires_grad:
            raise PluginError(f"{who} returned the metric '{name}' with a gradient; needs it detached")
        if name in RESERVED_METRICS:
            raise PluginError(f"{who} returned the metric '{name}', which rlcore logs itself; choose another name")


def _probe_selection(selection: Callable[..., Any], who: str, inputs: SelectionInputs) -> Tensor:
    who = f"{who}: its selection, probed on 4 rows,"
    return checked_selection(who, _called(selection, inputs, who), inputs.mask_BT)


def checked_selection(who: str, found: Any, mask_BT: Tensor) -> Tensor:
    """(B, T) result of a selection; PluginError unless it is a tensor of booleans, False outside the mask."""
    shape = tuple(mask_BT.shape)
    if not isinstance(found, Tensor) or found.shape != mask_BT.shape or found.dtype is not torch.bool:
        raise PluginError(f"{who} returned {_described(found)}; needs a tensor of booleans of shape {shape}")
    if bool((found & ~mask_BT).any()):
        raise PluginError(f"{who} picked tokens outside mask_BT; needs tokens that have a loss")
    return found


def _called(function: Callable[..., Any], inputs: Any, who: str) -> Any:
    """The result of the function, with the inputs as its only argument."""
    try:
        inspect.signature(function).bind(inputs)
    except TypeError as cause:
        needed = f"needs one parameter, {type(inputs).__name__}"
        raise PluginError(f"{who} takes {inspect.signature(function)}: {cause}; {needed}") from cause
    except ValueError:  # a function of C without a text signature
        pass
    with warnings.catch_warnings(), boundary(f"{who} failed", PluginError, CALLED):
        warnings.simplefilter("ignore")
        copies = {name: value.detach().clone() for name, value in vars(inputs).items() if isinstance(value, Tensor)}
        with unchanged_torch(who):
            found = function(inputs)
    for name, before in copies.items():
        if not _same(getattr(inputs, name), before):
            raise PluginError(f"{who} changed {name} in place; needs its inputs left as they are")
    return found


def _check_zero(who: str, values_BT: Tensor, mask_BT: Tensor) -> None:
    outside_BT = (values_BT.detach() != 0) & ~mask_BT
    if bool(outside_BT.any()):
        row, token = outside_BT.nonzero()[0].tolist()
        found = f"{values_BT[row, token].item():g} for row {row}, token {token}"
        raise PluginError(f"{who} {found}, outside the loss mask; needs 0 there")


def _described(found: Any) -> str:
    """A description of a result for errors."""
    if isinstance(found, Tensor):
        return f"a tensor of {str(found.dtype).removeprefix('torch.')} of shape {tuple(found.shape)}"
    return kind(found) + (" (it is an `async def`; needs a plain `def`)" if inspect.iscoroutine(found) else "")


def _mask(rows: tuple[str, ...]) -> Tensor:
    return torch.tensor([[value == "x" for value in row] for row in rows])


def _same(found: Tensor, before: Tensor) -> bool:
    """True if all numbers are equal, or NaN in both."""
    equal = found.shape == before.shape and torch.isclose(found, before, rtol=0.0, atol=0.0, equal_nan=True).all()
    return bool(equal)
