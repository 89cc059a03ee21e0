"""Offers and requests of wrong data are refused where they are made, naming class, field, value and what is needed."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rlcore.config.providers import ConfigSection
from rlcore.contracts.actor import ACTOR, ActorWorker
from rlcore.contracts.components import Component, RewardComponent
from rlcore.contracts.offers import Algorithm, AlgorithmKind, PoolSpec, RewardFunction, Scope, WorkerClass
from rlcore.contracts.requests import Role, WorkerRequest
from rlcore.contracts.reward_models import RewardModel
from rlcore.errors import OfferError, PluginError
from rlcore.plan import Facts, make_plan
from rlcore.plugins import configure
from rlcore.testing.null import SETTINGS, NullActor
from rlcore.testing.packages import importable, write_package

SCOPES = "needs one of Scope.SAMPLE, Scope.GROUP, Scope.BATCH"
KINDS = "needs one of AlgorithmKind.ADVANTAGE, AlgorithmKind.POLICY_LOSS"
NUMBER = "needs a finite number"
ABOVE = "needs a finite number above 0"
TEXT = "needs one line of text, not empty"
NAME = "needs a name of letters, digits, '.', '_' and '-'"
FORM = "needs 'module:attr' or '/abs/file.py:attr'"


@dataclass
class Melting:
    """Settings that are not frozen."""


class Silent:
    """Its repr raises."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


async def later(*arguments: Any) -> None:
    """A coroutine function."""


GOOD: dict[type[Any], dict[str, Any]] = {
    Role: {"name": "judge", "interface": ActorWorker},
    WorkerRequest: {"role": ACTOR, "backend": "fast"},
    WorkerClass: {"interface": ActorWorker, "backend": "fast", "cls": NullActor},
    PoolSpec: {"name": "mine"},
    RewardComponent: {
        "name": "liked", "weight": 1.0, "scope": Scope.SAMPLE, "deadline_s": 1.0, "kind": "judge", "served_by": "judge",
    },
    Component: {"name": "mine", "build": lambda context: None},
    RewardFunction: {"name": "half", "target": "a.b:c"},
    Algorithm: {"name": "mine", "kind": AlgorithmKind.ADVANTAGE, "target": "a.b:c", "scope": Scope.GROUP},
    ConfigSection: {"name": "mine", "type": PoolSpec},
    RewardModel: {"path": "some-model"},
}  # fmt: skip

WRONG: dict[tuple[type[Any], str], tuple[str, list[Any]]] = {
    (Role, "name"): (NAME, ["", None, 3, "a/b", "a\nb", ".."]),
    (Role, "interface"): ("needs a subclass of rlcore.contracts.workers.Worker", [None, "ActorWorker", int, ACTOR]),
    (WorkerRequest, "role"): ("needs a Role", ["actor", None, ActorWorker]),
    (WorkerRequest, "embedded_in"): ("needs a Role or None", ["actor", False]),
    (WorkerRequest, "backend"): (TEXT, ["", " ", None, 3, "a\nb", Silent()]),
    (WorkerRequest, "pool"): (NAME, [None, "", 0, "a b"]),
    (WorkerRequest, "replicas"): ("needs a whole number of at least 1", ["2", 0, -1, 1.0, True, None, math.nan]),
    (WorkerRequest, "ranks"): ("needs a whole number of at least 1", ["2", 0, -1, 1.5, True, None]),
    (WorkerRequest, "threads"): ("needs a whole number of at least 0", ["2", -1, 1.5, False, None]),
    (WorkerRequest, "asleep_bytes"): ("needs a whole number of at least 0", ["2", -1, 1.5, False, None]),
    (WorkerRequest, "cached_tokens"): ("needs a whole number of at least 0", ["2", -1, 1.5, False, None]),
    (WorkerRequest, "gpus"): (f"{NUMBER} of at least 0", [math.nan, math.inf, 10**400, -1, "1", True, None, 1j]),
    (WorkerRequest, "cpus"): (f"{NUMBER} of at least 0", [math.nan, math.inf, -0.5, "1", True, None]),
    (WorkerRequest, "bytes_per_parameter"): (f"{NUMBER} of at least 0", [math.nan, math.inf, -0.5, "1", True]),
    (WorkerRequest, "device_frac"): (f"{NUMBER} of at least 0, at most 1", [math.nan, 1.5, -0.5, "1", True]),
    (WorkerRequest, "isolated"): ("needs True or False", ["no", "", 0, None]),
    (WorkerRequest, "targets"): (
        "needs a ",
        [None, "a:b", ["a:b"], {"loss": 3}, {"loss": "a"}, {3: "a:b"}, {"": "a:b"}],
    ),
    (WorkerRequest, "model"): ("needs a ModelFacts or None", ["gpt2", 7]),
    (WorkerRequest, "engine"): ("needs a EngineConfig or None", ["hf", {}]),
    (WorkerRequest, "settings"): ("needs a str", [None, 3]),
    (WorkerRequest, "shared_prefix"): ("needs one of planned, none, tree, cache", ["trie", None, True]),
    (WorkerRequest, "takes_adapter"): ("needs True or False", ["yes", 1, None]),
    (WorkerRequest, "trains"): ("needs True or False", ["yes", 1, None]),
    (WorkerRequest, "spec"): ("needs an instance of a frozen dataclass, or None", ["m", {}, RewardModel, Melting()]),
    (RewardModel, "path"): (TEXT, ["", None, Path("m")]),
    (RewardModel, "tokenizer"): ("needs a str", [None, 3]),
    (RewardModel, "dtype"): (TEXT, ["", None]),
    (RewardModel, "label"): ("needs a whole number of at least 0", [-1, "0", None, True]),
    (RewardModel, "activation"): ("needs one of none, sigmoid, softmax", ["relu", None]),
    (RewardModel, "max_tokens"): ("needs a whole number of at least 1", [0, None, 1.5]),
    (RewardModel, "kinds"): ("needs a frozenset", ["judge", None, ["judge"]]),
    (RewardModel, "options"): ("needs a Mapping", [None, ["a"]]),
    (WorkerRequest, "note"): ("needs a str", [None, 3]),
    (WorkerRequest, "nodes_key"): ("needs a str", [None, 3]),
    (WorkerClass, "interface"): (
        "needs a subclass of rlcore.contracts.workers.Worker",
        [None, "ActorWorker", int, object()],
    ),
    (WorkerClass, "cls"): ("needs a subclass of rlcore.contracts.workers.Worker", [None, "NullActor", int, object()]),
    (WorkerClass, "backend"): (TEXT, ["", None, 3]),
    (WorkerClass, "embedded_in"): ("needs a Role or None", ["actor", ActorWorker]),
    (WorkerClass, "on_every_rank"): ("needs True or False", ["yes", 1, None]),
    (WorkerClass, "context_parallel"): ("needs True or False", ["yes", 1, None]),
    (WorkerClass, "isolated"): ("needs True or False", ["no", 0, None]),
    (WorkerClass, "keeps_cache"): ("needs True or False", ["no", 0, None]),
    (WorkerClass, "complete"): ("(config, section, request)", [None, {}, lambda: None, lambda config, section: None]),
    (WorkerClass, "weight_sync"): (
        "needs a frozenset of: disk, ipc, nccl, shm, tcp",
        ["disk", None, {"disk"}, frozenset("a")],
    ),
    (PoolSpec, "name"): (NAME, [None, "", 3, "a b"]),
    (PoolSpec, "gpus_per_node"): ("needs a whole number of at least 0", ["8", -1, 0.5, True, None]),
    (PoolSpec, "nodes"): ("needs a whole number of at least 1", ["1", 0, -1, 1.0, True, None]),
    (PoolSpec, "colocates"): ("needs a tuple of names, each once", ["main", None, ("a", "a"), (1,), ("",)]),
    (PoolSpec, "placement"): ("choose from: pack", ["near", None, True, []]),
    (PoolSpec, "labels"): ("needs a ", [None, "gpu", {"": "a"}, {"a": 3}]),
    (PoolSpec, "resources"): (
        "needs ",
        [None, {"": 1}, {"fast": 0}, {"fast": "1"}, {"fast": math.nan}, {"fast": 10**400}, {"fast": 1.5}],
    ),
    (RewardComponent, "name"): (TEXT, ["", None]),
    (RewardComponent, "weight"): (NUMBER, ["1", None, math.nan, math.inf, True]),
    (RewardComponent, "scope"): (SCOPES, ["sample", "each", None]),
    (RewardComponent, "deadline_s"): (ABOVE, [0, -1.0, math.nan, math.inf, "1", None]),
    (RewardComponent, "kind"): (TEXT, ["", None]),
    (RewardComponent, "served_by"): (TEXT, ["", None]),
    (RewardComponent, "on_failure"): ("needs a str", [None]),
    (Component, "name"): (TEXT, ["", None, 3]),
    (Component, "build"): ("(context)", [None, "build", 3, lambda: None, lambda a, b: None, lambda a, *, b: None]),
    (Component, "requests"): ("(config, section)", [None, [], lambda: (), lambda config: (), lambda a, b, c: ()]),
    (Component, "reward_components"): ("(config, section)", [None, [], lambda: (), lambda config: ()]),
    (Component, "uses_reward_functions"): ("needs True or False", ["yes", 1, None]),
    (RewardFunction, "name"): (TEXT, ["", None, 3]),
    (RewardFunction, "target"): (FORM, ["", None, "math", ":f", "a:", "a:<lambda>", len, "a b:c", "a:b-c"]),
    (RewardFunction, "scope"): (SCOPES, ["group", "step", None, 1]),
    (RewardFunction, "deadline_s"): (ABOVE, [0, -1.0, math.nan, math.inf, "1", True]),
    (Algorithm, "name"): (TEXT, ["", None, 3]),
    (Algorithm, "kind"): (KINDS, ["advantage", "critic", None]),
    (Algorithm, "target"): (FORM, ["", None, "math", len]),
    (Algorithm, "scope"): (SCOPES, ["group", None]),
    (Algorithm, "needs"): ("needs a frozenset of Need.VALUES", [None, "values", {"values"}, ["values"]]),
    (Algorithm, "per_token"): ("needs True or False", ["yes", 1, None]),
    (Algorithm, "ignores_zero_advantages"): ("needs True or False", ["yes", 1, None]),
    (Algorithm, "selection"): (FORM, [None, "math", 3]),
    (ConfigSection, "name"): (NAME, [None, "", "a b"]),
    (ConfigSection, "type"): ("needs a frozen dataclass", [None, int, Melting, PoolSpec("a"), "Settings"]),
    (ConfigSection, "defaults"): ("needs a mapping of dotted keys", [None, [], "a=1", {3: 1}, {"": 1}]),
}
CASES = [(kind, field, value, message) for (kind, field), (message, values) in WRONG.items() for value in values]


def named(case: Any) -> str:
    """The id of a case."""
    return case.__name__ if isinstance(case, type) else "silent" if isinstance(case, Silent) else str(case)[:20]


@pytest.mark.parametrize(("kind", "field", "value", "message"), CASES, ids=named)
def test_a_wrong_value_is_refused_where_it_is_given(kind: type[Any], field: str, value: Any, message: str) -> None:
    kind(**GOOD[kind])
    with pytest.raises(OfferError) as caught:
        kind(**GOOD[kind] | {field: value})
    line = str(caught.value)
    assert line.startswith(kind.__name__)
    assert field in line
    assert message in line
    assert "\n" not in line
    assert len(line) < 250


def test_every_field_of_every_offer_is_looked_at() -> None:
    every = {(kind, field) for kind in GOOD for field in kind.__dataclass_fields__}
    assert every == set(WRONG)


@pytest.mark.parametrize("field", ["build", "requests", "reward_components"])
def test_a_component_of_coroutine_functions_is_refused(field: str) -> None:
    with pytest.raises(OfferError, match=f"Component 'mine': {field} is an `async def`; needs a plain `def`"):
        Component(**GOOD[Component] | {field: later})


def test_what_is_right_is_let_pass() -> None:
    request = WorkerRequest(
        ACTOR, "a b", gpus=1, cpus=0, device_frac=1.0, targets={"loss": "/abs/a.py:f"}, isolated=True
    )
    assert (request.backend, request.cpus, dict(request.targets)) == ("a b", 0, {"loss": "/abs/a.py:f"})
    assert PoolSpec("p.1", 8, 2, ("a", "b")).name == "p.1"
    assert RewardFunction("two words", "a:Class.method", Scope.BATCH, 3).name == "two words"
    assert Component("c", build=lambda *arguments: None, requests=lambda config, section=None: ()).name == "c"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Path]:
    """A directory of packages that are installed for the test."""
    with importable(tmp_path / "site") as place:
        yield place


def plan(*overrides: str) -> None:
    """Make the plan of a null run with the plugin data_wrong."""
    hooks, loaded = configure([], [*SETTINGS, *overrides], ["null", "data_wrong"])
    make_plan(loaded, hooks, Facts(cpus=2))


def refused(site: Path, source: str, *overrides: str) -> str:
    """The one line with which the plan of a null run with this plugin is refused."""
    head = (
        "from rlcore.contracts.actor import ActorWorker\n"
        "from rlcore.contracts.hooks import hookimpl\n"
        "from rlcore.contracts.offers import *\n"
        "from rlcore.contracts.components import *\n"
        "from rlcore.config.providers import *\n"
    )
    head += "from rlcore.testing.null import NullActor\nfrom rlcore.contracts.workers import Worker\n"
    write_package(site, "data_wrong", head + source)
    with pytest.raises(PluginError) as caught:
        plan(*overrides)
    assert type(caught.value) is PluginError
    return str(caught.value)


HOOKS = {
    "rlcore_config_sections()": ("ConfigSection('data_wrong', int)", "ConfigSection 'data_wrong': type is"),
    "rlcore_reward_functions()": ("RewardFunction('r', 'a:b', scope='group')", "scope is 'group'"),
    "rlcore_reward_managers()": ("Component('c', lambda: None)", "build takes ()"),
    "rlcore_critic_engines()": ("Component('c', None)", "build is None"),
    "rlcore_agent_loops()": ("Component(None, print)", "name is None"),
    "rlcore_algorithms()": ("Algorithm('a', 'advantage', 'a:b', Scope.GROUP)", "kind is 'advantage'"),
    "rlcore_resource_pools()": ("PoolSpec('p', '8')", "gpus_per_node is '8'"),
    "rlcore_worker_classes()": ("WorkerClass(ActorWorker, 'x', NullActor, isolated='no')", "isolated is 'no'"),
}


@pytest.mark.parametrize("hook", HOOKS)
def test_an_offer_of_wrong_data_is_named_with_plugin_and_hook(site: Path, hook: str) -> None:
    offer, message = HOOKS[hook]
    source = f"@hookimpl\ndef {hook}: return [{offer}]\n"
    line = refused(site, source)
    assert line.startswith(f"plugin 'data_wrong' (data-wrong 1.0): {hook}: ")
    assert message in line


REQUESTS = {
    "role": "WorkerRequest('judge', 'x')",
    "replicas": "WorkerRequest(Role('judge', Worker), 'x', replicas='2')",
    "pool": "WorkerRequest(Role('judge', Worker), 'x', pool=None)",
    "gpus": "WorkerRequest(Role('judge', Worker), 'x', gpus=float('nan'))",
    "targets": "WorkerRequest(Role('judge', Worker), 'x', targets=['a:b'])",
    "isolated": "WorkerRequest(Role('judge', Worker), 'x', isolated='no')",
    "name": "WorkerRequest(Role('', Worker), 'x')",
    "returned a list with 'judge'; needs WorkerRequest": "'judge'",
}


@pytest.mark.parametrize("field", REQUESTS)
def test_a_request_of_wrong_data_is_named_with_the_component(site: Path, field: str) -> None:
    source = f"""
@hookimpl
def rlcore_reward_managers():
    return [Component('asking', print, lambda config, section: [{REQUESTS[field]}], uses_reward_functions=True)]
"""
    line = refused(site, source, "reward.manager=asking")
    assert line.startswith("reward 'asking' of plugin 'data_wrong' (data-wrong 1.0): requests()")
    assert field in line


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("data_absent:loss", "there is no module 'data_absent'"),
        ("rlcore.plan.nothing:loss", "there is no module 'rlcore.plan.nothing'"),
        ("rlcore.algo.advantage:absent", "defines no 'absent'"),
        ("rlcore.errors:ANSWERED", "is tuple; needs a function"),
        ("data_wrong:two", "takes (inputs, more); needs to take 1 argument"),
        ("data_wrong:later", "is async def; needs a plain function"),
    ],
)
def test_an_algorithm_that_is_not_there_is_refused_by_the_plan(site: Path, reference: str, message: str) -> None:
    source = f"""
def two(inputs, more): ...
async def later(inputs): ...

@hookimpl
def rlcore_algorithms():
    return [Algorithm('mine', AlgorithmKind.ADVANTAGE, '{reference}', Scope.GROUP)]
"""
    line = refused(site, source, "algo.advantage=mine")
    assert line.startswith("plugin 'data_wrong' (data-wrong 1.0): algo.advantage=mine: its target ")
    assert message in line


def test_a_reference_of_a_request_is_looked_up(site: Path) -> None:
    source = """
@hookimpl
def rlcore_reward_managers():
    request = WorkerRequest(Role('judge', Worker), 'x', targets={'loss': 'data_absent:loss'})
    return [Component('asking', print, lambda config, section: [request], uses_reward_functions=True)]
"""
    line = refused(site, source, "reward.manager=asking")
    assert "role 'judge' of reward 'asking' of plugin 'data_wrong' (data-wrong 1.0): its target for 'loss'" in line
    assert "there is no module 'data_absent'" in line
