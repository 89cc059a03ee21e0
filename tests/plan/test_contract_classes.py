"""A stranger's class for every role, and a stranger's component for every slot, wrong in every way: nothing starts."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlcore.errors import PlanError, PluginError
from rlcore.plan import RunPlan
from rlcore.plugins.planning import plan_run
from rlcore.testing import write_prompts
from rlcore.testing.null import SETTINGS
from rlcore.testing.packages import importable, write_package

PLAIN, ASYNC, STREAM = "def wrong(self): ...", "async def wrong(self): ...", "async def wrong(self): yield"
ROLES = {
    "actor": (
        "rlcore.contracts.actor:ActorWorker",
        "update",
        PLAIN,
        ("actor.backend=wrong", "rollout.backend=null_replica"),
        (),
    ),
    "rollout": ("rlcore.contracts.rollout:RolloutWorker", "generate", STREAM, ("rollout.backend=wrong",), ()),
    "reference": (
        "rlcore.contracts.reference:ReferenceWorker",
        "logprobs",
        PLAIN,
        ("algo.kl.placement=loss", "reference.backend=wrong"),
        (),
    ),
    "critic": (
        "rlcore.contracts.critic:CriticWorker",
        "update",
        PLAIN,
        ("algo.preset=ppo", "plugins.critic_engine.backend=wrong"),
        ("critic_engine",),
    ),
    "judge": (
        "rlcore.contracts.reward_replica:RewardReplica",
        "score",
        ASYNC,
        (
            "plugins.reward_loop.models.judge.path=judge",
            "plugins.reward_loop.models.judge.backend=wrong",
            "plugins.reward_loop.rewards.good.served_by=judge",
            "plugins.reward_loop.rewards.good.kind=model",
        ),
        ("reward_loop",),
    ),
}
"""By role: the interface, a method of it, that method without parameters, the settings that ask for the backend
`wrong`, and the shipped plugins."""
SLOTS = {
    "agent": ("rlcore.contracts.agents:AgentLoop", "rollout", STREAM, "rlcore_agent_loops", "rollout.agent=wrong"),
    "reward": (
        "rlcore.contracts.reward_manager:RewardManager",
        "score",
        STREAM,
        "rlcore_reward_managers",
        "reward.manager=wrong",
    ),
    "critic": ("rlcore.contracts.critic:CriticEngine", "update", ASYNC, "rlcore_critic_engines", "critic.engine=wrong"),
}
"""By slot: the interface, a method of it, that method without parameters, the hook and the setting."""
BASE = """
    from {module} import {interface}
    from rlcore import hookimpl
    from rlcore.contracts.components import Component
    from rlcore.contracts.offers import WorkerClass
    from rlcore.contracts.workers import Worker

    class Mine({interface}):
        pass

    async def load_weights(self, handle): ...

    for name in {interface}.__abstractmethods__:
        setattr(Mine, name, getattr({interface}, name))
    Mine.__abstractmethods__ = frozenset()
    Mine.weights, Mine.load_weights = lambda self, version, directory: None, load_weights
"""
"""A class that conforms, as far as can be seen from outside."""
MISTAKES = {
    "registered": (
        "class Mine({root}):\n        pass\n    {interface}.register(Mine)",
        "does not inherit from {interface}",
    ),
    "None": ("Mine.{method} = None", "{method} is None; needs a method"),
    "no parameters": ("{stub}\n    Mine.{method} = wrong", "{method}() takes (self), needs (self, "),
    "generator": ("def wrong(self, *args):\n        yield\n    Mine.{method} = wrong", "{method}() is a generator"),
    "abstract": ("class Mine({interface}):\n        pass", "it is abstract: it does not define"),
    "setup": ("async def wrong(self): ...\n    Mine.{life} = wrong", "{life}() is "),
}
WORKER_HOOK = """
    @hookimpl
    def rlcore_worker_classes():
        return [WorkerClass({interface}, "wrong", Mine)]
"""
COMPONENT_HOOK = """
    def build(context) -> Mine: ...

    @hookimpl
    def {hook}():
        return [Component("wrong", build)]
"""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Path]:
    """A directory of packages that are installed for the test."""
    with importable(tmp_path / "site") as place:
        yield place


def write_wrong(site: Path, names: dict[str, str], mistake: str, hook: str) -> str:
    """The plugin `wrong_one` with that mistake; returns what its refusal says."""
    code, says = MISTAKES[mistake] if mistake else ("", "")
    body = f"{BASE}\n    {code}\n{hook}"
    for key, value in names.items():
        body, says = body.replace(f"{{{key}}}", value), says.replace(f"{{{key}}}", value)
    write_package(site, "wrong_one", body)
    return says


def names_of(interface: str, method: str, stub: str, **more: str) -> dict[str, str]:
    """The names in the plugin's text."""
    module, _, name = interface.partition(":")
    return {"module": module, "interface": name, "method": method, "stub": stub, **more}


def planned(*overrides: str, plugins: tuple[str, ...] = ()) -> RunPlan:
    """The production plan of the null run with some overrides and the plugin `wrong_one`."""
    return plan_run([], [*SETTINGS, *overrides], ["null", "wrong_one", *plugins])


def refused(kind: type[Exception], *overrides: str, plugins: tuple[str, ...] = ()) -> str:
    """The one line with which the plan is refused; no thread was started."""
    threads = threading.active_count()
    with pytest.raises(kind) as caught:
        planned(*overrides, plugins=plugins)
    assert threading.active_count() == threads
    line = str(caught.value)
    assert "\n" not in line
    return line


@pytest.mark.parametrize("role", ROLES)
def test_a_stranger_s_class_that_conforms_is_planned(site: Path, role: str) -> None:
    *names, settings, plugins = ROLES[role]
    write_wrong(site, names_of(*names), "", WORKER_HOOK)
    plan = planned(*settings, plugins=plugins)
    assert [worker.provided_by for worker in plan.workers if worker.cls.__qualname__ == "Mine"] == [
        "plugin 'wrong_one' (wrong-one 1.0)"
    ]


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("role", ROLES)
def test_a_wrong_class_for_a_role_is_refused_by_name(site: Path, role: str, mistake: str) -> None:
    *names, settings, plugins = ROLES[role]
    says = write_wrong(site, names_of(*names, life="setup", root="Worker"), mistake, WORKER_HOOK)
    line = refused(PluginError, *settings, plugins=plugins)
    assert says in line
    assert "plugin 'wrong_one' (wrong-one 1.0): offers wrong_one.Mine as " in line


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("slot", SLOTS)
def test_a_wrong_component_for_a_slot_is_refused_by_name(site: Path, slot: str, mistake: str) -> None:
    *names, hook, setting = SLOTS[slot]
    says = write_wrong(site, names_of(*names, life="state", hook=hook, root="object"), mistake, COMPONENT_HOOK)
    line = refused(PluginError, setting)
    assert says in line
    assert "plugin 'wrong_one' (wrong-one 1.0): component 'wrong': builds wrong_one.Mine as " in line


def test_a_class_made_in_a_function_is_refused_for_a_role_with_processes(site: Path) -> None:
    *names, settings, plugins = ROLES["judge"]
    local = "\n    def make(base):\n        class Local(base): ...\n        return Local\n    Mine = make(Mine)"
    write_wrong(site, names_of(*names), "", local + WORKER_HOOK)
    line = refused(PlanError, *settings, plugins=plugins)
    assert "role 'judge' of reward 'reward_loop' of plugin 'reward_loop'" in line
    assert "wrong_one.make.<locals>.Local of plugin 'wrong_one' (wrong-one 1.0) is imported by name" in line
    assert "define it at the top level of its module" in line
    assert planned(*settings, "cluster.in_process=true", plugins=plugins).workers


@pytest.mark.slow
def test_the_command_refuses_a_virtual_subclass_and_starts_nothing(site: Path, tmp_path: Path) -> None:
    *names, settings, plugins = ROLES["judge"]
    write_wrong(site, names_of(*names, root="Worker"), "registered", WORKER_HOOK)
    data = f"data.sources.all.path={write_prompts(tmp_path / 'prompts.jsonl', 8)}"
    enabled = [word for name in ("null", "wrong_one", *plugins) for word in ("--plugin", name)]
    command = [sys.executable, "-m", "rlcore", "train", *SETTINGS, *settings, data, *enabled]
    path = f"{site}:{Path(__file__).parent.parent.parent}"
    began = time.monotonic()
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={"PYTHONPATH": path, "PATH": ""}, cwd=tmp_path
    )
    assert done.returncode == 2, done.stderr
    assert time.monotonic() - began < 20  # ten times what is promised
    assert done.stderr.count("\n") == 1
    assert "wrong_one.Mine as RewardReplica for backend 'wrong', but it does not inherit from RewardReplica" in (
        done.stderr
    )
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("role", "left_out", "settings"),
    [
        ("rollout", "load_weights", ("rollout.backend=wrong",)),
        ("actor", "weights", ("actor.backend=wrong", "rollout.backend=null_replica")),
    ],
)
def test_who_cannot_hand_over_or_take_weights_is_refused_where_they_travel(
    site: Path, role: str, left_out: str, settings: tuple[str, ...]
) -> None:
    *names, _, _ = ROLES[role]
    write_wrong(site, names_of(*names), "", f"    del Mine.{left_out}\n{WORKER_HOOK}")
    line = refused(PlanError, *settings)
    assert f"Mine of plugin 'wrong_one' (wrong-one 1.0) defines no {left_out}()" in line
