"""`reward.functions`: each name matched with a file, a module, an entry point or a plugin's offer."""

import ast
import pickle
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rlcore.config import LoadedConfig, RewardFunctionConfig, RunConfig
from rlcore.config.file_paths import directory_of
from rlcore.config.providers import Offer
from rlcore.contracts.children import check_exported
from rlcore.contracts.components import ResolvedReward, RewardComponent
from rlcore.contracts.offers import RewardFunction, Scope
from rlcore.errors import CALLED, ConfigError, PluginError, boundary, misspelt, nearest
from rlcore.errors.checks.data import listed
from rlcore.errors.checks.targets import static_problem
from rlcore.imports import importable_target, no_relative_imports
from rlcore.plan.catalog import remedy
from rlcore.plan.components import section_of
from rlcore.plan.planner_input import Offers, join_names
from rlcore.plan.run_plan import ComponentPlan
from rlcore.plan.sources import definition, function_node, returns_no_function
from rlcore.plan.time_limit import limited
from rlcore.types import SAMPLE_NAMES

MAX_NAMED = 6
"""Maximum number of files that an error suggests instead of a missing one."""

NEEDED = (
    "needs f(prompts, completions, **columns) with any of these names, compute_score(data_source, solution_str, "
    "ground_truth), f(trajectory) or f(trajectories)"
)
"""The signatures of docs/rewards.md."""


def resolve_rewards(loaded: LoadedConfig, offers: Offers, manager: ComponentPlan) -> tuple[ResolvedReward, ...]:
    """The configured reward functions by name, without importing them.

    ConfigError for a file, function or name that does not exist, and for functions that the run's manager does not
    compute; PluginError for a name that is offered twice.
    """
    functions = loaded.config.reward.functions
    if functions:
        _check_computes(sorted(functions), manager)
    return tuple(_resolve(name, functions[name], loaded, offers) for name in sorted(functions))


def brought_rewards(config: RunConfig, manager: ComponentPlan) -> tuple[RewardComponent, ...]:
    """The reward components of the manager itself; PluginError naming it if it fails to list them."""
    whose = f"{manager.slot} '{manager.component.name}' of {manager.provided_by}: reward_components()"
    with boundary(whose, PluginError, CALLED), limited(whose):
        parts = manager.component.reward_components(config, manager.section)
    return tuple(listed(parts, RewardComponent, whose))


def _check_computes(names: Sequence[str], manager: ComponentPlan) -> None:
    """ConfigError for functions that the manager would ignore."""
    if not manager.component.uses_reward_functions:
        raise ConfigError(
            f"reward.functions: {', '.join(names)} are configured, but reward.manager="
            f"{manager.component.name} of {manager.provided_by} does not compute them (its Component does not say "
            "uses_reward_functions=True); leave them out, or choose another reward.manager, such as functions"
        )


def _resolve(name: str, config: RewardFunctionConfig, loaded: LoadedConfig, offers: Offers) -> ResolvedReward:
    key = f"reward.functions.{name}"
    check_exported(f"{key}.env", config.env)
    target, provided_by, offer = _find(f"{key}.fn", config.fn, loaded, offers)
    function = offer.value if offer else None
    scope = Scope(config.scope) if config.scope != "declared" else (function.scope if function else Scope.SAMPLE)
    deadline = config.deadline_s
    if function and function.deadline_s is not None and loaded.origins.get(f"{key}.deadline_s", "default") == "default":
        deadline = function.deadline_s
    after = ""
    if config.post_process:
        after, _, _ = _find(f"{key}.post_process", config.post_process, loaded, offers)
        if scope is not Scope.SAMPLE:
            raise ConfigError(f"{key}.post_process: scope={scope} sees the whole group already; needs scope=sample")
    settings = section_of(loaded.config, offers, offer.provider) if offer else None
    with boundary(f"{provided_by}: its settings section cannot be sent to the process of '{config.fn}'", PluginError):
        pickle.dumps(settings)
    is_factory = _takes_nothing_of_a_sample(f"{key}.fn", target, config, settings)
    return ResolvedReward(
        name, target, provided_by, config.weight, scope, deadline, dict(config.kwargs), settings, is_factory, after
    )


def no_reward_function(target: str) -> str | None:
    """The certain problem with a function that takes nothing of a sample and does not return the reward function.

    None if it may be one. The function is not imported.
    """
    node = definition(target)
    if node is None or isinstance(node, ast.ClassDef) or node.args.vararg or node.args.kwarg:
        return None
    arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
    names = [argument.arg for argument in arguments]
    if not SAMPLE_NAMES.isdisjoint(names) or not returns_no_function(node):
        return None
    return f"{_takes_nothing(target, node, names)}, and a call of it returns no function; {NEEDED}"


def _takes_nothing(target: str, node: ast.FunctionDef | ast.AsyncFunctionDef, names: Iterable[str]) -> str:
    """The beginning of an error about a function with these names of arguments."""
    return (
        f"{target} has the signature ({ast.unparse(node.args)}), which takes nothing of a sample"
        f"{misspelt(names, SAMPLE_NAMES)}"
    )


def _takes_nothing_of_a_sample(key: str, target: str, config: RewardFunctionConfig, settings: Any) -> bool:
    """True if the source is a factory: calling it returns the reward function; ConfigError if it then lacks
    `kwargs`."""
    if (problem := no_reward_function(target)) is not None:
        raise ConfigError(f"{key}: {problem}")
    node = function_node(target)
    if node is None or node.args.vararg or node.args.kwarg:
        return False
    positional = [*node.args.posonlyargs, *node.args.args]
    named = {argument.arg for argument in (*positional, *node.args.kwonlyargs)}
    if not named.isdisjoint(SAMPLE_NAMES):
        return False
    required = {argument.arg for argument in positional[: len(positional) - len(node.args.defaults)]}
    pairs = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    required |= {pair.arg for pair, default in pairs if default is None}
    missing = sorted(required - set(config.kwargs) - ({"settings"} if settings is not None else set()))
    if missing:
        raise ConfigError(
            f"{key}: {_takes_nothing(target, node, sorted(named))}; {NEEDED}, or, where a call of it "
            f"returns the function, kwargs for {', '.join(missing)}"
        )
    return True


def _find(key: str, fn: str, loaded: LoadedConfig, offers: Offers) -> tuple[str, str, Offer[RewardFunction] | None]:
    """The function's target, its provider, and its offer if there is one."""
    where, colon, attribute = fn.rpartition(":")
    if not colon:
        offer = _offered(key, fn, offers)
        target = importable_target(offer.value.target)
        if (problem := static_problem(target)) is not None:
            raise PluginError(f"{offer.provider}: reward function '{fn}' ({target}): {problem}")
        return target, str(offer.provider), offer
    if not attribute.isidentifier():
        raise ConfigError(f"{key}={fn}: '{attribute}' is not a name; needs file.py:name or module:name")
    if where.endswith(".py"):
        path = _file(key, where, loaded)
        _check_defines(key, path, attribute)
        return f"{path}:{attribute}", f"file {path}", None
    if not all(part.isidentifier() for part in where.split(".")):
        raise ConfigError(
            f"{key}={fn}: '{where}' is neither a .py file nor a module; needs file.py:name or module:name"
        )
    if (problem := static_problem(fn)) is not None:
        raise ConfigError(f"{key}={fn}: {problem}")
    return fn, f"module {where}", None


def _offered(key: str, name: str, offers: Offers) -> Offer[RewardFunction]:
    enabled, installed = offers.reward_functions(), offers.entry_point_rewards()
    offered = (*enabled, *installed)
    # A distribution that is only installed takes no name from the core or an enabled plugin.
    found = [offer for offer in enabled if offer.value.name == name]
    found = found or [offer for offer in installed if offer.value.name == name]
    if len(found) > 1:
        whose = join_names([f"{offer.provider} as {offer.value.target}" for offer in found])
        raise PluginError(
            f"{key}={name}: offered by {whose}; one name needs one offer, so set {key}=MODULE:NAME instead"
        )
    if not found:
        choices = sorted({offer.value.name for offer in offered})
        hint = "a function in a file is named file.py:name" if name.endswith(".py") else ""
        hint = hint or remedy(key, name, "reward.functions", offers.not_enabled(f"reward function {name}"))
        raise ConfigError(
            f"{key}: no plugin offers a reward function '{name}'; {nearest(name, choices)}" + (hint and f"; {hint}")
        )
    return found[0]


def _file(key: str, where: str, loaded: LoadedConfig) -> Path:
    """The file's absolute path. A relative path is searched for in the directory of the config file that names it, then
    in the working directory."""
    named_in = directory_of(key, loaded.origins)
    directories = list(dict.fromkeys(place.resolve() for place in (named_in, Path.cwd()) if place is not None))
    for directory in directories:
        if (directory / where).is_file():
            return (directory / where).resolve()
    if Path(where).is_absolute():
        raise ConfigError(f"{key}: found no file '{where}'")
    file = f"the directory of {Path(loaded.origins[key]).name}, then from " if named_in is not None else ""
    counts_from = f"{file}the working directory"
    others = sorted({path.name for directory in directories for path in directory.glob("*.py")})
    hint = f"; {nearest(Path(where).name, others)}" if 0 < len(others) <= MAX_NAMED else ""
    raise ConfigError(
        f"{key}: found no file '{where}', which counts from {counts_from} "
        f"({', '.join(str(directory / where) for directory in directories)}){hint}"
    )


def _check_defines(key: str, path: Path, attribute: str) -> None:
    """ConfigError unless the file, which is only parsed, defines the name at its top level and can be imported
    alone."""
    try:
        tree = ast.parse(path.read_text("utf-8"), str(path))
    except (SyntaxError, ValueError) as cause:
        raise ConfigError(f"{key}: {path} is not a Python file: {cause}") from cause
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
    if "*" not in names and attribute not in names:
        defined = [n.name for n in tree.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))]
        raise ConfigError(f"{key}: {path} defines no '{attribute}'; {nearest(attribute, defined)}")
    for statement in tree.body:
        if isinstance(statement, ast.ImportFrom) and statement.level:
            raise ConfigError(f"{key}: {no_relative_imports(path)}")
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        is_named = any(isinstance(target, ast.Name) and target.id == attribute for target in targets)
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Lambda) and is_named:
            raise ConfigError(f"{key}: {path}: {attribute} is a lambda; needs a function or class with a name")
