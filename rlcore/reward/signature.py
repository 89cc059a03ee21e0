"""Recognises the signature of a reward function when it is loaded."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, cast

from rlcore.errors import ConfigError, PluginError, misspelt, nearest
from rlcore.types import SAMPLE_NAMES


class Style(StrEnum):
    """The calling convention of a function."""

    COLUMNS = "f(prompts, completions, **columns) -> list[float | None]"
    COMPUTE_SCORE = "compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float | tuple | dict"
    TRAJECTORY = "f(trajectory) -> float | Reward"
    TRAJECTORIES = "f(trajectories) -> list[float | Reward | None]"


TRL_NAMES = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""Arguments from TRL's trainer to every function, in addition to the dataset's columns. One of them makes a function
TRL's."""
COMPUTE_SCORE_NAMES = ("data_source", "solution_str", "ground_truth", "extra_info")
LOG_NAMES = (*COMPUTE_SCORE_NAMES, "query", "response", "score", "latency", "details")
"""Arguments of the method `log` of a class, by the names that it takes."""
METHODS = ("score", "compute_score")
ACCEPTED = "accepted are " + "; ".join(Style)
SETTINGS = "settings"
"""The parameter that gets the settings section of the plugin which offers the function."""
FEW_TRL = "any of " + ", ".join(TRL_NAMES)


@dataclass(frozen=True)
class Signature:
    """The parameters of a function, without those bound by `kwargs`."""

    style: Style
    method: str
    """The method that scores, for a class; empty for a function."""
    is_async: bool
    names: frozenset[str]
    """Parameters that can be given by name."""
    required: frozenset[str]
    open: bool
    """True if it has **kwargs, which takes any further name."""

    @property
    def takes_many(self) -> bool:
        """True if it scores a list of samples in one call."""
        return self.style in (Style.COLUMNS, Style.TRAJECTORIES)

    def takes(self, name: str) -> bool:
        """True if the function accepts an argument with this name."""
        return self.open or name in self.names


def is_factory(target: Any, kwargs: Mapping[str, Any]) -> bool:
    """True if calling `target` with `kwargs` should return the reward function, like TRL's `get_...` functions.

    It is a function without parameters for a sample or further names, and `kwargs` are all that it needs.
    """
    if not inspect.isroutine(target) or _unnamed(target):
        return False
    try:
        signature = inspect.signature(target)
        signature.bind(**kwargs)
    except (TypeError, ValueError):
        return False
    return _takes_nothing_of_a_sample(list(signature.parameters.values()))


def read_signature(name: str, target: Any, kwargs: Mapping[str, Any], scope: str, made: bool = False) -> Signature:
    """The signature of a function, or of a class's `score` or `compute_score`.

    PluginError naming the accepted signatures for anything else, a lambda, a nested function and a signature that
    cannot serve `scope`; ConfigError for `kwargs` that it does not take. `made`: a factory returned it, so it may be
    nested.
    """
    who = f"reward function '{name}'"
    method = _method(who, target)
    call = _callable(who, target, method, made)
    parameters = _parameters(who, call)
    if method:
        if not isinstance(inspect.getattr_static(target, method), (staticmethod, classmethod)):
            parameters = parameters[1:]
        _check_constructor(name, target, kwargs)
    else:
        parameters = _without(name, parameters, kwargs)
    signature = _classify(who, parameters, method, _is_async(call))
    if scope != "sample" and not signature.takes_many:
        raise PluginError(
            f"{who}: scope={scope} scores several samples in a call, and {signature.style} takes one; "
            f"accepted are {Style.COLUMNS}; {Style.TRAJECTORIES}; or scope=sample"
        )
    return signature


def with_settings(who: str, target: Any, kwargs: Mapping[str, Any], settings: Any) -> dict[str, Any]:
    """The `kwargs` with the plugin's settings section, for a function, factory or constructor that takes `settings`.

    PluginError when it needs them and there is no section.
    """
    try:
        parameter = inspect.signature(target).parameters.get(SETTINGS)
    except (TypeError, ValueError):
        parameter = None
    if parameter is None or SETTINGS in kwargs:
        return dict(kwargs)
    if settings is not None:
        return {**kwargs, SETTINGS: settings}
    if parameter.default is parameter.empty:
        raise PluginError(
            f"{who}: takes settings, and there are none: needs a plugin that offers it by the hook "
            "rlcore_reward_functions and declares its section by rlcore_config_sections; or kwargs.settings"
        )
    return dict(kwargs)


def check_hooks(who: str, target: type, signature: Signature, scope: str) -> None:
    """PluginError for a class whose `post_process_scores` or `log` cannot be called as docs/rewards.md says."""
    after: Any = getattr(target, "post_process_scores", None)
    if after is not None:
        if not callable(after) or len(_of_method(who, target, "post_process_scores")) < 1:
            raise PluginError(f"{who}: post_process_scores takes no scores; needs post_process_scores(self, scores)")
        if scope != "sample" or signature.takes_many:
            raise PluginError(
                f"{who}: has post_process_scores, for which scope=sample and a call of one sample are due"
            )
    if not logs(target, signature):
        return
    for problem in _of_method(who, target, "log"):
        needed = problem.default is problem.empty and problem.kind not in (problem.VAR_KEYWORD, problem.VAR_POSITIONAL)
        if needed and problem.name not in LOG_NAMES:
            raise PluginError(f"{who}: log needs '{problem.name}'; it is given {', '.join(LOG_NAMES)}, by these names")


def logs(target: Any, signature: Signature) -> bool:
    """True if calls are reported to the method `log`: only for classes with `compute_score`, where it has this
    meaning."""
    return signature.method == "compute_score" and callable(getattr(target, "log", None))


def _of_method(who: str, target: type, method: str) -> list[inspect.Parameter]:
    parameters = _parameters(who, getattr(target, method))
    is_bound = isinstance(inspect.getattr_static(target, method), (staticmethod, classmethod))
    return parameters if is_bound else parameters[1:]


def _method(who: str, target: Any) -> str:
    """The method of a class that scores; empty for anything but a class."""
    if not isinstance(target, type):
        return ""
    for method in METHODS:
        if callable(getattr(target, method, None)):
            return method
    raise PluginError(
        f"{who}: the class {target.__name__} has no method score and no compute_score; {ACCEPTED}, as its method score"
    )


def _unnamed(target: Any) -> bool:
    qualified = getattr(target, "__qualname__", "")
    return "<lambda>" in qualified or "<locals>" in qualified


def _callable(who: str, target: Any, method: str, made: bool) -> Callable[..., Any]:
    if method:
        return cast(Callable[..., Any], getattr(target, method))
    if not callable(target):
        raise PluginError(f"{who}: is neither a function nor a class, found {type(target).__name__}; {ACCEPTED}")
    if _unnamed(target) and not made:
        qualified = target.__qualname__
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
        return  # a C class without a signature: the call itself reports the error


def _without(name: str, parameters: list[inspect.Parameter], kwargs: Mapping[str, Any]) -> list[inspect.Parameter]:
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        choices = [
            parameter.name
            for parameter in parameters
            if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
        for key in kwargs:
            if key not in choices:
                raise ConfigError(
                    f"reward.functions.{name}.kwargs.{key}: the function has no such parameter; {nearest(key, choices)}"
                )
    return [parameter for parameter in parameters if parameter.name not in kwargs]


def _takes_nothing_of_a_sample(parameters: list[inspect.Parameter]) -> bool:
    is_open = any(parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL) for parameter in parameters)
    return not is_open and SAMPLE_NAMES.isdisjoint(parameter.name for parameter in parameters)


def _classify(who: str, parameters: list[inspect.Parameter], method: str, is_async: bool) -> Signature:
    named = [
        parameter for parameter in parameters if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    names = frozenset(parameter.name for parameter in named)
    required = frozenset(parameter.name for parameter in named if parameter.default is parameter.empty)
    is_open = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    style = None
    if not names.isdisjoint(TRL_NAMES):
        style = Style.COLUMNS
    elif {"solution_str", "ground_truth"} <= names and required <= set(COMPUTE_SCORE_NAMES):
        style = Style.COMPUTE_SCORE
    elif required == {"trajectory"}:
        style = Style.TRAJECTORY
    elif required == {"trajectories"}:
        style = Style.TRAJECTORIES
    if style is None:
        found = ", ".join(str(parameter) for parameter in parameters)
        way_out = ""
        if required and not method and _takes_nothing_of_a_sample(parameters):
            way_out = f"; or kwargs for {', '.join(sorted(required))}, with which a call of it returns such a function"
        question = misspelt([parameter.name for parameter in named], SAMPLE_NAMES)
        raise PluginError(f"{who}: has the signature ({found}){question}; {ACCEPTED}, with {FEW_TRL}{way_out}")
    if "environments" in required:
        raise PluginError(f"{who}: takes environments, which only TRL's trainer has; needs a default for it")
    return Signature(style, method, is_async, names, required, is_open)
