"""Which of the accepted signatures a reward function has: looked at once, when it is loaded."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, cast

from rlcore.errors import ConfigError, PluginError, nearest


class Style(StrEnum):
    """How a function wants to be called."""

    COLUMNS = "f(prompts, completions, **columns) -> list[float | None]"
    COMPUTE_SCORE = "compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float | dict"
    TRAJECTORY = "f(trajectory) -> float | Reward"
    TRAJECTORIES = "f(trajectories) -> list[float | Reward | None]"


COMPUTE_SCORE_NAMES = ("data_source", "solution_str", "ground_truth", "extra_info")
ACCEPTED = "accepted are " + "; ".join(Style)


@dataclass(frozen=True)
class Signature:
    """What is known of a function's parameters, those bound by `kwargs` left out."""

    style: Style
    is_class: bool
    is_async: bool
    names: frozenset[str]
    """Parameters that can be given by name."""
    required: frozenset[str]
    open: bool
    """Has **kwargs: takes any further name."""

    @property
    def takes_many(self) -> bool:
        """Scores a list of samples in one call."""
        return self.style in (Style.COLUMNS, Style.TRAJECTORIES)

    def takes(self, name: str) -> bool:
        """Whether the function can be given an argument of this name."""
        return self.open or name in self.names


def read_signature(name: str, target: Any, kwargs: Mapping[str, Any], scope: str) -> Signature:
    """The signature of a function, or of a class's `score`.

    PluginError naming the accepted signatures for anything else, a lambda, a nested function and a signature that
    cannot serve `scope`; ConfigError for `kwargs` that it does not take.
    """
    who = f"reward function '{name}'"
    is_class = isinstance(target, type)
    call = _callable(who, target)
    parameters = _parameters(who, call)
    if is_class:
        parameters = parameters[1:]
        _check_constructor(name, target, kwargs)
    else:
        parameters = _without(name, parameters, kwargs)
    signature = _classify(who, parameters, is_class, _is_async(call))
    if scope != "sample" and not signature.takes_many:
        raise PluginError(
            f"{who}: scope={scope} scores several samples in a call, and {signature.style} takes one; "
            f"accepted are {Style.COLUMNS}; {Style.TRAJECTORIES}; or scope=sample"
        )
    return signature


def _callable(who: str, target: Any) -> Callable[..., Any]:
    if isinstance(target, type):
        score: Callable[..., Any] | None = getattr(target, "score", None)
        if not callable(score):
            raise PluginError(
                f"{who}: the class {target.__name__} has no method score; {ACCEPTED}, as its method score"
            )
        return score
    if not callable(target):
        raise PluginError(f"{who}: is no function and no class, found {type(target).__name__}; {ACCEPTED}")
    qualified = getattr(target, "__qualname__", "")
    if "<lambda>" in qualified or "<locals>" in qualified:
        kind = "a lambda" if qualified.endswith("<lambda>") else f"a nested function ({qualified})"
        raise PluginError(f"{who}: is {kind}; needs a function or class at the top level of its module")
    return cast(Callable[..., Any], target)


def _parameters(who: str, call: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(call).parameters.values())
    except (TypeError, ValueError) as cause:
        raise PluginError(f"{who}: its signature cannot be read ({cause}); {ACCEPTED}") from cause


def _is_async(call: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(getattr(call, "__call__", None))  # noqa: B004


def _check_constructor(name: str, target: type, kwargs: Mapping[str, Any]) -> None:
    try:
        inspect.signature(target).bind(**kwargs)
    except TypeError as cause:
        raise ConfigError(f"reward.functions.{name}.kwargs: {target.__name__}(...): {cause}") from cause
    except ValueError:
        return  # a class of C code that does not tell its signature: the call itself will


def _without(name: str, parameters: list[inspect.Parameter], kwargs: Mapping[str, Any]) -> list[inspect.Parameter]:
    if not any(each.kind is each.VAR_KEYWORD for each in parameters):
        choices = [each.name for each in parameters if each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD)]
        for key in kwargs:
            if key not in choices:
                raise ConfigError(
                    f"reward.functions.{name}.kwargs.{key}: the function has no such parameter; {nearest(key, choices)}"
                )
    return [each for each in parameters if each.name not in kwargs]


def _classify(who: str, parameters: list[inspect.Parameter], is_class: bool, is_async: bool) -> Signature:
    named = [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    names = frozenset(each.name for each in named)
    required = frozenset(each.name for each in named if each.default is each.empty)
    is_open = any(each.kind is each.VAR_KEYWORD for each in parameters)
    style = None
    if "completions" in names:
        style = Style.COLUMNS
    elif {"solution_str", "ground_truth"} <= names and required <= set(COMPUTE_SCORE_NAMES):
        style = Style.COMPUTE_SCORE
    elif required == {"trajectory"}:
        style = Style.TRAJECTORY
    elif required == {"trajectories"}:
        style = Style.TRAJECTORIES
    if style is None:
        found = ", ".join(str(each) for each in parameters)
        raise PluginError(f"{who}: has the signature ({found}); {ACCEPTED}")
    return Signature(style, is_class, is_async, names, required, is_open)
