"""However a plugin's code ends, the command ends with one line that names plugin and place, and never with 0."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlcore.cli import main
from rlcore.testing.packages import importable, write_package
from rlcore.testing.runs import run_settings

pytestmark = pytest.mark.slow

HEAD = """
import sys
import time
from dataclasses import dataclass, field
import numpy as np
from rlcore.agents.single_turn import SingleTurn
from rlcore.contracts.critic import CriticEngine
from rlcore.contracts.hooks import hookimpl
from rlcore.contracts.offers import *; from rlcore.contracts.components import *; from rlcore.config.providers import *
from rlcore.reward.functions import FunctionRewards
from rlcore.contracts.workers import Worker

class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no text")

def again():
    again()

def fail():
    {fails}

"""
WAYS = {
    "sys.exit(0)": "it called sys.exit(0)",
    "sys.exit()": "it called sys.exit(None)",
    "sys.exit('bye')": "it called sys.exit('bye')",
    "raise GeneratorExit": ": GeneratorExit",
    "raise StopIteration('x')": "StopIteration: x",
    "raise KeyboardInterrupt": "KeyboardInterrupt",
    "raise BaseExceptionGroup('two', [SystemExit(0), KeyError(2)])": "two (2 sub-exceptions)",
    "raise StopAsyncIteration": "StopAsyncIteration",
    "again()": "RecursionError: ",
    "raise Mute": "Mute: <exception str() failed>",
    "raise ValueError('one\\ntwo')": "ValueError: one",
    "raise ExceptionGroup('two', [ValueError(1), KeyError(2)])": "two (2 sub-exceptions)",
}
PLUGIN = "plugin 'ends_wrong' (ends-wrong 1.0)"
COMPONENTS = """
class Agent(SingleTurn): ...
class Rewards(FunctionRewards): ...
class Critic(CriticEngine):
    async def values(self, batch):
        return np.zeros(batch.tokens.token_ids_BT.shape, np.float32)
    async def update(self, minibatch):
        return {}
    def actor_may_update(self):
        return True

@hookimpl
def rlcore_agent_loops():
    return [Component('ends', lambda context: Agent(context.generator, context.tokens))]
@hookimpl
def rlcore_reward_managers():
    return [Component('ends', lambda context: Rewards(context), uses_reward_functions=True)]
@hookimpl
def rlcore_critic_engines():
    return [Component('ends', lambda context: Critic())]
"""
CHOSEN = {
    "agent": ["rollout.agent=ends"],
    "reward": ["reward.manager=ends"],
    "critic": ["critic.engine=ends", "algo.advantage=gae"],
}
CLASSES = {"agent": "Agent", "reward": "Rewards", "critic": "Critic"}


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Path]:
    """A directory of packages that are installed for the test."""
    with importable(tmp_path / "site") as place:
        yield place


class Project:
    """A null run with the plugin ends_wrong."""

    def __init__(self, site: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.site, self.capsys = site, capsys
        self.settings = [f"{key}={value}" for key, value in run_settings(site.parent, 8).items()]
        self.settings += ["train.name=run", "reward.functions.letters.children=1"]

    def write(self, source: str, fails: str = "sys.exit(0)") -> None:
        write_package(self.site, "ends_wrong", HEAD.replace("{fails}", fails) + source)

    def refused(self, command: str, *more: str) -> str:
        """The one line that the command ends with."""
        code = main([command, *self.settings, *more, "--plugin", "null", "--plugin", "ends_wrong"])
        _, err = self.capsys.readouterr()
        lines = [line for line in err.splitlines() if line.startswith("rlcore: ")]
        assert (code, len(lines)) == (2, 1), err
        assert "Traceback" not in err
        return lines[0].removeprefix("rlcore: ")


@pytest.fixture
def project(site: Path, capsys: pytest.CaptureFixture[str]) -> Project:
    return Project(site, capsys)


PLANNING = {
    "importing ends_wrong": ("fail()", ()),
    "rlcore_algorithms()": ("@hookimpl\ndef rlcore_algorithms(): fail()", ()),
    "rlcore_resource_pools()": ("@hookimpl\ndef rlcore_resource_pools(config, requests): fail()", ()),
    "section type Settings": (
        "@dataclass(frozen=True)\nclass Settings:\n    x: list[int] = field(default_factory=fail)\n"
        "@hookimpl\ndef rlcore_config_sections(): return [ConfigSection('ends_wrong', Settings)]",
        (),
    ),
    "requests()": (
        "@hookimpl\ndef rlcore_reward_managers():\n"
        "    return [Component('ends', print, lambda config, section: fail(), uses_reward_functions=True)]",
        ("reward.manager=ends",),
    ),
    "reward_components()": (
        "@hookimpl\ndef rlcore_reward_managers():\n"
        "    return [Component('ends', print, reward_components=lambda config, it: fail(), "
        "uses_reward_functions=True)]",
        ("reward.manager=ends",),
    ),
}


FEW = ("sys.exit(0)", "raise GeneratorExit", "raise Mute")


@pytest.mark.parametrize(
    ("place", "way"), [(place, way) for place in PLANNING for way in (WAYS if place == "requests()" else FEW)]
)
def test_what_plugin_code_raises_while_planning_is_one_line(project: Project, place: str, way: str) -> None:
    source, settings = PLANNING[place]
    project.write(source, way)
    line = project.refused("plan", *settings)
    assert all(text in line for text in (PLUGIN, place)), line
    assert WAYS[way] in line or place.startswith("section")  # OmegaConf words some of them itself


@pytest.mark.parametrize("way", FEW)
def test_settings_that_refuse_a_value_are_named_with_their_key(project: Project, way: str) -> None:
    source = """
@dataclass(frozen=True)
class Settings:
    level: int = 1
    def __post_init__(self):
        if self.level > 3:
            fail()
@hookimpl
def rlcore_config_sections(): return [ConfigSection('ends_wrong', Settings)]
"""
    project.write(source, way)
    line = project.refused("plan", "plugins.ends_wrong.level=4")
    assert line.startswith(f"plugins.ends_wrong of {PLUGIN}: ")
    assert WAYS[way] in line


def test_a_setting_whose_condition_cannot_be_evaluated_is_the_plugins_fault(project: Project) -> None:
    source = """
from rlcore.config import option
@dataclass(frozen=True)
class Settings:
    level: int = option(1, used_when="absent.key == 3")
@hookimpl
def rlcore_config_sections(): return [ConfigSection('ends_wrong', Settings)]
"""
    project.write(source)
    line = project.refused("plan")
    assert line.startswith(f"{PLUGIN}: plugins.ends_wrong.level: its used_when: KeyError: 'absent.key'")


def test_objects_of_the_module_that_raise_when_looked_at_are_the_plugins_fault(project: Project) -> None:
    project.write("class Lazy:\n    def __getattr__(self, name): fail()\nlazy = Lazy()\n")
    assert project.refused("plan").startswith(f"{PLUGIN}: it called sys.exit(0)")


LIVE = {
    ("agent", "start()"): "async def start(self): fail()",
    ("reward", "start()"): "async def start(self): fail()",
    ("critic", "close()"): "async def close(self): fail()",
    ("agent", "check()"): "async def check(self, prompts): fail()",
    ("critic", "expect()"): "async def expect(self, num_updates): fail()",
    ("reward", "scope"): "@property\n    def scope(self): fail()",
    ("agent", "state()"): "def state(self): fail()",
    ("reward", "state()"): "def state(self): fail()",
    ("critic", "state()"): "def state(self): fail()",
    ("agent", "metrics()"): "def metrics(self): fail()",
    ("reward", "metrics()"): "def metrics(self): fail()",
    ("critic", "metrics()"): "def metrics(self): fail()",
    ("critic", "actor_may_update()"): "def actor_may_update(self): fail()",
    ("critic", "save()"): "async def save(self, directory): fail()",
}


@pytest.mark.parametrize(("slot", "what"), LIVE)
def test_a_component_that_exits_with_0_ends_the_run_with_one_line(project: Project, slot: str, what: str) -> None:
    method = LIVE[slot, what]
    name = CLASSES[slot]
    project.write(COMPONENTS + f"class Failing({name}):\n    {method}\n{name} = Failing\n")
    line = project.refused("train", *CHOSEN[slot])
    assert line.startswith(f"{slot} 'ends' of {PLUGIN}: {what}: it called sys.exit(0)")


@pytest.mark.parametrize("way", FEW)
def test_a_component_that_cannot_be_built_is_named(project: Project, way: str) -> None:
    offer = "Component('ends', lambda context: fail(), uses_reward_functions=True)"
    project.write(f"@hookimpl\ndef rlcore_reward_managers(): return [{offer}]", way)
    line = project.refused("train", "reward.manager=ends")
    assert line.startswith(f"reward 'ends' of {PLUGIN}: build(): ")
    assert WAYS[way] in line


@pytest.mark.parametrize("name", ["step", "reward/mean"])
def test_a_metric_that_would_hide_one_of_the_core_is_refused(project: Project, name: str) -> None:
    project.write(COMPONENTS + f"Agent.metrics = lambda self: {{'{name}': 7.0}}\n")
    line = project.refused("train", *CHOSEN["agent"])
    assert line.startswith(f"agent 'ends' of {PLUGIN}: metrics(): found '{name}', a metric of the core")


def test_a_state_that_is_not_json_is_named_when_it_is_saved(project: Project) -> None:
    project.write(COMPONENTS + "Agent.state = lambda self: {'seen': {1, 2}}\n")
    line = project.refused("train", *CHOSEN["agent"])
    assert line.startswith(f"agent 'ends' of {PLUGIN}: state(): TypeError: Object of type set is not JSON")


@pytest.mark.parametrize(("slot", "method"), [("agent", "restore"), ("reward", "restore"), ("critic", "restore_state")])
def test_a_component_that_cannot_continue_is_named(project: Project, slot: str, method: str) -> None:
    name = CLASSES[slot]
    project.write(COMPONENTS + f"from pathlib import Path\nif Path('{project.site}/second').exists():\n"
                  f"    {name}.{method} = lambda self, state: fail()\n")  # fmt: skip
    arguments = [*project.settings, *CHOSEN[slot], "--plugin", "null", "--plugin", "ends_wrong"]
    assert main(["train", *arguments, "train.max_steps=1"]) == 0
    del sys.modules["ends_wrong"]
    (project.site / "second").touch()
    line = project.refused("train", *CHOSEN[slot], "--resume")
    assert line.startswith(f"{slot} 'ends' of {PLUGIN}: {method}(): it called sys.exit(0)")


def test_a_run_that_a_plugin_ends_names_the_last_checkpoint(project: Project) -> None:
    source = "def metrics(self):\n    self.n = getattr(self, 'n', 0) + 1\n    return fail() if self.n > 1 else {}\n"
    project.write(COMPONENTS + source + "Agent.metrics = metrics\n")
    line = project.refused("train", *CHOSEN["agent"], "checkpoint.every_steps=1")
    assert "last checkpoint: " in line
    assert line.endswith("step_1, continue with --resume")


ENDS = {
    "sys.exit(0)": "sys.exit(0)",
    "import os; os._exit(0)": "os._exit(0)",
    "import posix; posix._exit(0)": "os._exit(0)",
    "import os; os.execv('/bin/true', ['true'])": "os.execv('/bin/true', ['true'])",
}


def real(project: Project, command: str, *more: str) -> tuple[int, str]:
    """The exit code and stderr of the command in a separate process."""
    arguments = [*project.settings, *more, "--plugin", "null", "--plugin", "ends_wrong"]
    env = os.environ | {"PYTHONPATH": str(project.site)}
    done = subprocess.run([sys.executable, "-m", "rlcore", command, *arguments], env=env, capture_output=True,
                          text=True, timeout=120, check=False)  # fmt: skip
    return done.returncode, done.stderr


@pytest.mark.parametrize("way", ENDS)
def test_the_real_command_does_not_exit_with_0(project: Project, way: str) -> None:
    source, settings = PLANNING["rlcore_resource_pools()"]
    project.write(source, way)
    code, message = real(project, "plan", *settings)
    called = f"rlcore: {PLUGIN}: rlcore_resource_pools(): it called {ENDS[way]}"
    assert (code, message.partition(" (/")[0], message.count("\n")) == (2, called, 1)


@pytest.mark.fault
def test_the_end_of_the_process_is_refused_in_build(project: Project) -> None:
    offer = "Component('ends', lambda context: fail(), uses_reward_functions=True)"
    project.write(f"@hookimpl\ndef rlcore_reward_managers(): return [{offer}]", "__import__('os')._exit(0)")
    called = f"rlcore: reward 'ends' of {PLUGIN}: build(): it called os._exit(0)"
    code, message = real(project, "train", "reward.manager=ends")
    assert (code, message.partition(" (/")[0]) == (2, called)


@pytest.mark.fault
def test_the_end_of_the_process_is_refused_in_a_probe(project: Project) -> None:
    offer = "Algorithm('ends', AlgorithmKind.ADVANTAGE, 'ends_wrong:leave', Scope.BATCH)"
    project.write(f"import os\ndef leave(inputs): os._exit(0)\n@hookimpl\ndef rlcore_algorithms(): return [{offer}]")
    code, message = real(project, "train", "algo.advantage=ends")
    assert (code, message.startswith(f"rlcore: algo.advantage=ends of {PLUGIN}: ")) == (2, True)
    assert message.partition(" (/")[0].endswith("failed: it called os._exit(0)")


def test_a_thread_of_the_plugin_ends_the_process_with_a_line_and_not_with_0(project: Project) -> None:
    project.write(
        "import os, threading\n@hookimpl\ndef rlcore_agent_loops():\n"
        "    threading.Thread(target=os._exit, args=(256,), name='watchdog').start()\n    time.sleep(60)"
    )
    code, message = real(project, "plan")
    assert code == 1
    assert message.startswith("rlcore: thread 'watchdog', at ")
    assert message.endswith(" called os._exit(256)\n")


def test_what_runs_at_the_end_of_the_interpreter_does_not_make_a_refusal_a_success(project: Project) -> None:
    project.write("import atexit, os\natexit.register(os._exit, 0)\n@hookimpl\ndef rlcore_algorithms(): return 3")
    code, message = real(project, "plan")
    assert (code, message.count("\n")) == (2, 1)


def test_a_forked_child_ends_as_it_likes(project: Project) -> None:
    project.write(
        COMPONENTS + "import os\nchild = os.fork()\nchild or os._exit(0)\n"
        "if os.waitpid(child, 0)[1]:\n    raise ValueError('the child did not end as it was told')"
    )
    assert real(project, "plan", *CHOSEN["agent"]) == (0, "")


ODD = {
    "class Signed:\n    def __get__(self, one, owner): fail()\nclass Odd(NullActor):\n    __signature__ = Signed()": (
        "looking at ends_wrong.Odd: it called sys.exit(0)"
    ),
    "class Worded:\n    def __repr__(self): raise OSError\nclass Odd(NullActor):\n    update = Worded()": (
        "update is a Worded; needs a method"
    ),
}


@pytest.mark.parametrize("source", ODD)
def test_a_class_that_raises_when_it_is_looked_at_is_the_plugins_fault(project: Project, source: str) -> None:
    project.write(
        "from rlcore.contracts.actor import ActorWorker\nfrom rlcore.testing.null import NullActor\n"
        + source
        + "\n@hookimpl\n"
        "def rlcore_worker_classes(): return [WorkerClass(ActorWorker, 'odd', Odd)]"
    )
    line = project.refused("plan", "actor.backend=odd")
    assert line.startswith(f"{PLUGIN}: ")
    assert ODD[source] in line


def test_an_annotation_that_is_prose_is_not_read(project: Project) -> None:
    project.write("def build(context) -> 'the agent loop':\n    fail()\n"
                  "@hookimpl\ndef rlcore_agent_loops(): return [Component('ends', build)]")  # fmt: skip
    line = project.refused("train", "rollout.agent=ends")
    assert line.startswith(f"agent 'ends' of {PLUGIN}: build(): it called sys.exit(0)")


WORKERS = {
    "setup": "reference[0].setup(): it called sys.exit(0)",
    "logprobs": "reference[0].logprobs(): it called sys.exit(0)",
    "__init__": "it called sys.exit(0)",
}


@pytest.mark.parametrize("method", WORKERS)
def test_a_worker_that_exits_with_0_ends_the_run_with_one_line(project: Project, method: str) -> None:
    project.write(
        "from rlcore.contracts.reference import ReferenceWorker\nfrom rlcore.testing.null import NullReference\n"
        f"class Leaving(NullReference):\n    def {method}(self, *arguments): fail()\n"
        "@hookimpl\ndef rlcore_worker_classes(): return [WorkerClass(ReferenceWorker, 'leaving', Leaving)]"
    )
    line = project.refused("train", "reference.backend=leaving", "algo.kl.placement=loss")
    assert WORKERS[method] in line
