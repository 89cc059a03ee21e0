"""The plan of reward functions, and refusals before any process starts."""

import asyncio
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rlcore.cli.plan import show
from rlcore.cluster.child import ChildProcesses
from rlcore.errors import ConfigError, PluginError, RlcoreError
from rlcore.imports import import_target
from rlcore.plan import Facts, RunPlan, make_plan, plan_to_json
from rlcore.plugins import configure
from rlcore.reward.functions import FunctionRewards
from rlcore.testing.null import SETTINGS
from rlcore.testing.packages import importable, write_package
from rlcore.testing.rewards import make_trajectory, reward_context, score_all
from rlcore.types import Reward

FN = "reward.functions.letters.fn"


def plan(*overrides: str, plugins: tuple[str, ...] = ()) -> RunPlan:
    """The plan of the run of the plugin null with these overrides."""
    hooks, loaded = configure([], [*SETTINGS, *overrides], ["null", *plugins])
    return make_plan(loaded, hooks, Facts())


def refused(kind: type[RlcoreError], *overrides: str, plugins: tuple[str, ...] = ()) -> str:
    """The one line with which the plan is refused."""
    with pytest.raises(kind) as caught:
        plan(*overrides, plugins=plugins)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of the test."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_file_with_relative_imports_is_refused_with_its_module_form(here: Path) -> None:
    (here / "pack").mkdir()
    (here / "pack" / "__init__.py").write_text("")
    (here / "pack" / "mine.py").write_text("from .helpers import x\ndef score(trajectory):\n    return x\n")
    assert f"name it as pack.mine:name, with {here} on PYTHONPATH" in refused(ConfigError, f"{FN}=pack/mine.py:score")


def test_a_relative_import_with_a_way_out_is_not_refused(here: Path) -> None:
    (here / "mine.py").write_text(
        "try:\n    from .a import x\nexcept ImportError:\n    x = 1\ndef score(trajectory): ...\n"
    )
    assert plan(f"{FN}=mine.py:score").rewards[0].target.endswith("mine.py:score")


def test_a_lambda_in_a_file_is_refused_by_its_name(here: Path) -> None:
    (here / "mine.py").write_text("score = lambda trajectory: 1.0\n")
    assert "mine.py: score is a lambda" in refused(ConfigError, f"{FN}=mine.py:score")


def test_a_file_that_imports_relatively_is_refused_with_its_module_form(tmp_path: Path) -> None:
    package = tmp_path / "outer_rel" / "inner"
    package.mkdir(parents=True)
    for directory in (package, package.parent):
        (directory / "__init__.py").write_text("")
    (package / "mine.py").write_text("from .helpers import x\n")
    with pytest.raises(
        PluginError, match=rf"mine.py: imports relatively.* name it as outer_rel\.inner\.mine:name, with {tmp_path}"
    ):
        import_target(f"{package / 'mine.py'}:x")


def judged(made: RunPlan, directory: Path) -> Reward:
    """The scores of one sample by the plan's reward functions, in their children."""

    async def main() -> Reward:
        children = ChildProcesses()
        context = reward_context({}, directory, children)
        config = replace(context.config, reward=replace(context.config.reward, functions=made.config.reward.functions))
        functions = {reward.name: reward for reward in made.rewards}
        manager = FunctionRewards(replace(context, config=config, reward_functions=functions))
        try:
            await manager.start()
            [scored] = await score_all(manager, [make_trajectory(text="abc")])
            return scored.reward
        finally:
            await manager.close()
            await children.close()

    return asyncio.run(main())


SECTION = """
from dataclasses import dataclass, field
from rlcore.contracts.hooks import hookimpl
from rlcore.config.providers import ConfigSection
from rlcore.contracts.offers import RewardFunction

RLCORE_API = "1"

@dataclass(frozen=True)
class Deep:
    power: float = 2.0

@dataclass(frozen=True)
class Mine:
    factor: float = 1.0
    deep: Deep = field(default_factory=Deep)

@hookimpl
def rlcore_config_sections():
    return [ConfigSection("NAME", Mine)]

@hookimpl
def rlcore_reward_functions():
    return [RewardFunction("scaled", REFERENCE), RewardFunction("asynchronous", REFERENCE + "_async")]

def scaled(trajectory, settings):
    if not isinstance(settings, Mine):
        raise TypeError(type(settings))
    return settings.factor * len(trajectory.text()) ** settings.deep.power

async def scaled_async(trajectory, settings):
    return scaled(trajectory, settings)
"""
HALF = "plugins.{}.factor=0.5"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Path]:
    """A directory of packages that are installed for the test."""
    with importable(tmp_path / "site") as place:
        yield place


@pytest.mark.slow
@pytest.mark.parametrize("fn", ["scaled", "asynchronous"])
def test_the_settings_of_a_plugin_reach_its_reward_functions_in_their_processes(site: Path, fn: str) -> None:
    name = f"settled_{fn}"
    write_package(site, name, SECTION.replace("NAME", name).replace("REFERENCE", f'"{name}:scaled"'))
    made = plan(f"{FN}={fn}", HALF.format(name), plugins=(name,))
    assert made.rewards[0].settings.factor == 0.5
    assert judged(made, site).score == 0.5 * 3**2


def test_settings_that_cannot_be_sent_to_the_functions_process_are_refused(site: Path) -> None:
    source = SECTION.replace("NAME", "locked").replace("REFERENCE", '"locked:scaled"')
    source += (
        "\n    def __post_init__(self):\n        object.__setattr__(self, 'lock', __import__('threading').Lock())\n"
    )
    head, _, tail = source.partition("    deep: Deep = field(default_factory=Deep)\n")
    body, _, method = tail.rpartition("\n    def __post_init__")
    write_package(
        site, "locked", f"{head}    deep: Deep = field(default_factory=Deep)\n    def __post_init__{method}{body}"
    )
    line = refused(PluginError, f"{FN}=scaled", HALF.format("locked"), plugins=("locked",))
    assert "plugin 'locked' (locked 1.0): its settings section cannot be sent to the process of 'scaled': " in line


IGNORES = """
from rlcore import hookimpl
from rlcore.contracts.components import Component

@hookimpl
def rlcore_reward_managers():
    return [Component("deaf", lambda context: None, reward_components=lambda config, section: PARTS, MORE)]
"""


def test_functions_that_the_chosen_manager_does_not_compute_are_refused(site: Path) -> None:
    write_package(site, "deaf", IGNORES.replace("PARTS, MORE", "[]"))
    (site / "mine.py").write_text("def score(trajectory): ...\n")
    line = refused(ConfigError, "reward.manager=deaf", f"{FN}=mine:score", plugins=("deaf",))
    assert line.startswith("reward.functions: ")
    assert "letters" in line
    assert "reward.manager=deaf of plugin 'deaf' (deaf 1.0) does not compute them" in line


@pytest.mark.parametrize("parts", ["None", "['a']", "{'a': 1}"])
def test_components_of_the_reward_that_are_not_such_are_refused(site: Path, parts: str) -> None:
    write_package(site, "deaf", IGNORES.replace("PARTS, MORE", f"{parts}, uses_reward_functions=True"))
    line = refused(PluginError, "reward.manager=deaf", plugins=("deaf",))
    assert line.startswith("reward 'deaf' of plugin 'deaf' (deaf 1.0): reward_components() returned ")
    assert line.endswith("RewardComponent")


@pytest.mark.slow
@pytest.mark.parametrize("where", ["__file__", "__name__"])
def test_the_settings_of_a_plugin_in_a_plain_file_reach_its_reward_functions(here: Path, where: str) -> None:
    path = here / "settled_file.py"
    path.write_text(SECTION.replace("NAME", "settled_file").replace("REFERENCE", f'{where} + ":scaled"'))
    made = plan(f"{FN}=scaled", HALF.format("settled_file"), plugins=(str(path),))
    assert judged(made, here).score == 0.5 * 3**2


@pytest.mark.slow
def test_functions_of_plugins_without_a_section_and_of_entry_points_get_no_settings(site: Path) -> None:
    source = """
    from rlcore.contracts.hooks import hookimpl
    from rlcore.contracts.offers import RewardFunction

    @hookimpl
    def rlcore_reward_functions():
        return [RewardFunction("unsettled", "no_section:score")]

    def score(trajectory, settings): ...
    """
    write_package(
        site,
        "no_section",
        source,
        entry_points={"rlcore": {"no_section": "no_section"}, "rlcore.rewards": {"entered": "no_section:score"}},
    )
    for fn, plugins in (("unsettled", ("no_section",)), ("entered", ())):
        with pytest.raises(PluginError, match="reward function 'letters': takes settings, and there are none"):
            judged(plan(f"{FN}={fn}", plugins=plugins), site)


@pytest.mark.slow
def test_a_function_of_namespace_packages_judges(site: Path) -> None:
    (site / "space_one" / "two").mkdir(parents=True)
    (site / "space_one" / "two" / "mod.py").write_text("def f(trajectory):\n    return 1.0\n")
    assert judged(plan(f"{FN}=space_one.two.mod:f"), site).score == 1.0


def test_a_function_for_groups_is_found_like_any_and_not_with_a_wider_scope(here: Path) -> None:
    (here / "mine.py").write_text("def centred(completions, score):\n    return score\n")
    settings = (f"{FN}=count_letter", "reward.functions.letters.post_process=mine.py:centred")
    assert plan(*settings).rewards[0].post_process == f"{here / 'mine.py'}:centred"
    message = refused(ConfigError, *settings[:1], "reward.functions.letters.post_process=mine.py:centered")
    assert "reward.functions.letters.post_process: " in message
    assert "did you mean 'centred'" in message
    assert "needs scope=sample" in refused(ConfigError, *settings, "reward.functions.letters.scope=group")


FACTORY = """
def make(max_len, *, cache):
    return lambda completion_ids, **kwargs: [1.0 for _ in completion_ids]
def passes(trajectory): ...
"""


def test_a_call_that_returns_the_function_is_noted_in_the_plan(
    site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = site / "factories"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("if True:\n    from .inner import make\n")
    (package / "inner.py").write_text(FACTORY)
    kwargs = ("reward.functions.letters.kwargs.max_len=3", "reward.functions.letters.kwargs.cache=1")
    made = plan(f"{FN}=factories:make", *kwargs)
    assert made.rewards[0].is_factory
    assert plan_to_json(made)["rewards"]["letters"]["is_factory"] is True
    monkeypatch.setenv("COLUMNS", "300")
    show(made, origins=False)
    assert "result of factories:make(cache, max_len)" in capsys.readouterr().out
    assert not plan(f"{FN}=factories.inner:passes").rewards[0].is_factory
    message = refused(ConfigError, f"{FN}=factories:make", kwargs[0])
    assert "has the signature (max_len, *, cache), which takes nothing of a sample" in message
    assert message.endswith("kwargs for cache")
    assert "factories" not in sys.modules


@pytest.mark.parametrize(
    "body",
    [
        "return 1.0 if one == two else 0.5 * len(one)",
        "return float(one in two)",
        "if one:\n        return None\n    return {'score': 1.0}",
        "yield one",
        "print(one, two)",
    ],
)
def test_a_function_that_takes_nothing_of_a_sample_and_returns_data_is_refused_with_all_kwargs(
    here: Path, body: str
) -> None:
    (here / "mine.py").write_text(f"def wrong(one, two):\n    {body}\n")
    kwargs = ("reward.functions.letters.kwargs.one=a", "reward.functions.letters.kwargs.two=b")
    message = refused(ConfigError, f"{FN}=mine.py:wrong", *kwargs)
    assert "has the signature (one, two), which takes nothing of a sample, and a call of it returns no" in message
    assert message.endswith("ground_truth), f(trajectory) or f(trajectories)")


def test_a_misspelt_parameter_is_compared_with_those_that_get_samples(here: Path) -> None:
    (here / "mine.py").write_text("def wrong(prompt, completion, answer):\n    return 1.0\n")
    question = "(did you mean 'prompts' instead of 'prompt' and 'completions' instead of 'completion'?)"
    message = refused(ConfigError, f"{FN}=mine.py:wrong")
    assert f"takes nothing of a sample {question}, and a call of it returns no function" in message
    (here / "mine.py").write_text("def wrong(prompt, completion):\n    return completion\n")
    message = refused(ConfigError, f"{FN}=mine.py:wrong", "reward.functions.letters.kwargs.prompt=a")
    assert "takes nothing of a sample (did you mean 'completions' instead of 'completion' and 'prompts' " in message


def test_a_module_or_function_that_does_not_exist_is_refused_before_any_process_starts(site: Path) -> None:
    package = site / "half_there"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("def scored(trajectory): ...\n")
    assert "there is no module 'not_there_at_all'" in refused(ConfigError, f"{FN}=not_there_at_all.mod:f")
    assert "defines no 'scord'; did you mean 'scored'?" in refused(ConfigError, f"{FN}=half_there:scord")
    write_package(site, "half_offered", "", entry_points={"rlcore.rewards": {"offered": "half_there:lost"}})
    message = refused(PluginError, f"{FN}=offered")
    assert message.startswith("entry point 'offered' (half-offered")
    assert "reward function 'offered' (half_there:lost): module 'half_there' defines no 'lost'" in message


def test_a_variable_that_is_named_for_a_function_and_not_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLCORE_TEST_KEY", "")
    settings = (f"{FN}=exact_match", "reward.functions.letters.env=[RLCORE_TEST_KEY]")
    plan(*settings)
    monkeypatch.delenv("RLCORE_TEST_KEY")
    assert refused(ConfigError, *settings) == (
        "reward.functions.letters.env: the environment variable 'RLCORE_TEST_KEY' is not set; export it, or leave it "
        "out"
    )
