"""The offers of a plugin in one file: the settings that use them, and a test of each with its suite."""

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcore.cli.plugin_package import Offers, known_offers
from rlcore.errors import ConfigError

if TYPE_CHECKING:
    from rlcore.plugins import Hooks


EXAMPLES: Mapping[str, Any] = {"int": 1, "float": 0.5, "str": "1", "bool": True, "list": [], "dict": {}}
"""Arguments of the call that a tool is tested with, by annotation."""


@dataclass(frozen=True)
class TestClass:
    """A subclass of a suite in the tests of the package."""

    suite: str
    offered: str
    """The name of the offer."""
    target: str
    """A Python expression."""
    more: Sequence[str] = ()
    """Further lines of the class."""
    module: str = "rlcore.testing"
    """The module of the suite."""
    imports: Sequence[str] = ()
    """Import statements that `more` needs."""


@dataclass(frozen=True)
class Uses:
    """Offers found in a file, with their settings and tests."""

    names: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    tests: list[TestClass] = field(default_factory=list)
    foreign: set[str] = field(default_factory=set)
    """Kinds of offers that belong to another plugin, whose package is required and which is enabled."""


def used_offers(file: Path) -> tuple[Offers, str]:
    """The offers with their settings, by kind, and the text of their tests; ConfigError if there are none."""
    from rlcore.cli.plugins import offer_names
    from rlcore.plugins import load

    hooks = load([str(file)])
    [provider] = hooks.providers()
    uses = Uses(offer_names(hooks, provider))
    _rewards_and_algorithms(hooks, file.stem, uses)
    _components(hooks, file.stem, uses)
    _workers(hooks, file.stem, uses)
    if "rlcore_resource_pools" in hooks.implemented(provider):
        _pool(file.stem, uses)
    if not uses.names:
        raise ConfigError(
            f"plugins package: '{file}' offers nothing; needs a hook that returns an offer, such as "
            "rlcore_reward_functions"
        )
    _tools(file, uses)
    known = known_offers()
    own = {"summary": ", ".join(uses.names), "settings": uses.settings}
    theirs = {kind: {**known[kind], "settings": {}} for kind in sorted(uses.foreign)}
    return {"file": own, **theirs}, tests_text(file.stem, uses.tests)


def _rewards_and_algorithms(hooks: "Hooks", name: str, uses: Uses) -> None:
    for reward in (offer.value for offer in hooks.reward_functions() if offer.provider.plugin == name):
        key = f"reward.functions.{reward.name}"
        uses.settings.update({f"{key}.fn": reward.name, f"{key}.children": 1})
        target = f'"rlcore_{name}:{reward.target.rpartition(":")[2]}"'
        uses.tests.append(TestClass("RewardFunctionSuite", reward.name, target))
    for algorithm in (offer.value for offer in hooks.algorithms() if offer.provider.plugin == name):
        uses.settings[f"algo.{algorithm.kind}"] = algorithm.name
        suite = "AdvantageEstimatorSuite" if algorithm.kind == "advantage" else "PolicyLossSuite"
        uses.tests.append(TestClass(suite, algorithm.name, _named("rlcore_algorithms", algorithm.name)))


def _components(hooks: "Hooks", name: str, uses: Uses) -> None:
    for agent in (offer.value for offer in hooks.agent_loops() if offer.provider.plugin == name):
        uses.settings["rollout.agent"] = agent.name
        uses.tests.append(TestClass("AgentLoopSuite", agent.name, f"{_named('rlcore_agent_loops', agent.name)}.build"))
    for cluster in (offer.value for offer in hooks.clusters() if offer.provider.plugin == name):
        uses.settings["cluster.backend"] = cluster.name
        uses.tests.append(TestClass("ClusterSuite", cluster.name, _named("rlcore_clusters", cluster.name)))
    for tracker in (offer.value for offer in hooks.trackers() if offer.provider.plugin == name):
        uses.settings["track.to"] = [*uses.settings.get("track.to", ()), tracker.name]
        uses.tests.append(TestClass("TrackerSuite", tracker.name, _named("rlcore_trackers", tracker.name)))
    for order in (offer.value for offer in hooks.prompt_orders() if offer.provider.plugin == name):
        uses.settings["data.order"] = order.name
        uses.tests.append(TestClass("PromptOrderSuite", order.name, _named("rlcore_prompt_orders", order.name)))


def _workers(hooks: "Hooks", name: str, uses: Uses) -> None:
    """Add rollout backends, judges, and a critic with the worker of its role."""
    backends = {}
    for worker in (offer.value for offer in hooks.worker_classes() if offer.provider.plugin == name):
        interface, backend = worker.interface.__name__, worker.backend
        every = "{(offer.interface.__name__, offer.backend): offer.cls for offer in rlcore_worker_classes()}"
        cls = f'{every}["{interface}", "{backend}"]'
        backends[interface] = cls
        if interface == "RewardReplica":
            uses.foreign.add("judge")
            settings = known_offers()["judge"]["settings"]
            uses.settings.update({key: value.replace("@name@", backend) for key, value in settings.items()})
        if interface == "RolloutWorker":
            uses.settings["rollout.backend"] = backend
        if interface in ("RolloutWorker", "RewardReplica", "CriticWorker"):
            uses.tests.append(TestClass(f"{interface}Suite", backend, cls))
    for critic in (offer.value for offer in hooks.critic_engines() if offer.provider.plugin == name):
        uses.settings.update({"algo.advantage": "gae", "critic.engine": critic.name})
        more = [f'workers = {{"critic": {backends["CriticWorker"]}}}'] if "CriticWorker" in backends else []
        target = f"{_named('rlcore_critic_engines', critic.name)}.build"
        uses.tests.append(TestClass("CriticEngineSuite", critic.name, target, more))


def _pool(name: str, uses: Uses) -> None:
    """Add a pool with the plugin's name, for replicas of a rollout."""
    uses.names.append(f"pool {name}")
    uses.settings.update({"rollout.backend": "null_replica", "rollout.pool": name})
    more = [f'requests = (WorkerRequest(ROLLOUT, "null_replica", "{name}", replicas=2, gpus=1.0),)']
    imports = [
        "from rlcore.contracts.requests import WorkerRequest",
        "from rlcore.contracts.rollout import ROLLOUT",
    ]
    uses.tests.append(TestClass("ResourcePoolSuite", "pool", "rlcore_resource_pools", more, imports=imports))


def _tools(file: Path, uses: Uses) -> None:
    """Add environments and tools, which no hook offers.

    An environment is a class that inherits from Environment. A tool is a function with a section `Args:` in its
    docstring that nothing else in the file names.
    """
    tree = ast.parse(file.read_text("utf-8"))
    nodes = list(ast.walk(tree))
    read = {node.id for node in nodes if isinstance(node, ast.Name)}
    texts = "\n".join(node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "Environment" for base in node.bases):
            _add_foreign("environment", node.name, file.stem, uses, [])
        if isinstance(node, ast.FunctionDef) and not node.decorator_list and node.name not in read:
            arguments = _example_call(node)
            if arguments is not None and "Args:" in (ast.get_docstring(node) or "") and f":{node.name}" not in texts:
                _add_foreign("tool", node.name, file.stem, uses, [f"calls = (({json.dumps(arguments)}, None),)"])


def _add_foreign(kind: str, attribute: str, name: str, uses: Uses, more: Sequence[str]) -> None:
    """Add a function or class with the settings and the suite of the example of its kind."""
    offer, target = known_offers()[kind], f"rlcore_{name}:{attribute}"
    uses.foreign.add(kind)
    for key, example in offer["settings"].items():
        uses.settings[key.replace(f".{example.rpartition(':')[2]}.", f".{attribute}.")] = target
    module, _, suite = offer["suite"].partition(":")
    uses.tests.append(TestClass(suite, attribute, json.dumps(target), more, module))


def _example_call(function: ast.FunctionDef) -> dict[str, Any] | None:
    """A value for each argument without a default, by its annotation; None if an annotation is not a plain type."""
    arguments = [*function.args.posonlyargs, *function.args.args]
    required = arguments[: len(arguments) - len(function.args.defaults)]
    names = {argument.arg: ast.unparse(argument.annotation or ast.Constant("")) for argument in required}
    if not set(names.values()) <= set(EXAMPLES):
        return None
    return {name: EXAMPLES[annotation] for name, annotation in names.items()}


def _named(hook: str, name: str) -> str:
    return f'{{offer.name: offer for offer in {hook}()}}["{name}"]'


def tests_text(name: str, tests: Sequence[TestClass]) -> str:
    """The module of the tests: a test of the plugin's contract, and a class per offer."""
    hooks = sorted(
        {
            hook
            for test in tests
            for text in (test.target, *test.more)
            for hook in re.findall(r"rlcore_\w+(?=\(\))|rlcore_resource_pools", text)
        }
    )
    suites: dict[str, set[str]] = {"rlcore.testing": {"check_plugin"}}
    for test in tests:
        suites.setdefault(test.module, set()).add(test.suite)
    imports = {line for test in tests for line in test.imports}
    imports |= {f"from {module} import {', '.join(sorted(names))}" for module, names in suites.items()}
    lines = ['"""The offers keep their contracts."""', "", *sorted(imports)]
    lines += ["", f"from rlcore_{name} import {', '.join(hooks)}"] if hooks else []
    lines += ["", "", "def test_the_plugin_keeps_its_contract():", f'    assert check_plugin("{name}").problems == ()']
    for test in tests:
        words = "".join(word.capitalize() for word in re.findall(r"[A-Za-z0-9]+", test.offered))
        lines += ["", "", f"class Test{words}{test.suite.removesuffix('Suite')}({test.suite}):"]
        lines += [f"    {line}" for line in (f"target = {test.target}", *test.more)]
    return "\n".join(lines) + "\n"
