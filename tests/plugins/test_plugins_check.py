"""`rlcore plugins --check`: the named plugins and no others, with their hooks, signatures, scopes and references."""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from rlcore.cli import main
from rlcore.cli.plugins import offer_names
from rlcore.errors import PluginError
from rlcore.plan.time_limit import LIMIT
from rlcore.plugins import configure, load
from rlcore.testing import check_plugin
from rlcore.testing.packages import importable, write_package

HEAD = (
    "from rlcore.contracts.hooks import hookimpl\n"
    "from rlcore.contracts.offers import *\n"
    "from rlcore.contracts.components import *\n"
    "from rlcore.config.providers import *\n"
)
FINE = HEAD + "@hookimpl\ndef rlcore_reward_functions(): return [RewardFunction('fine', 'math:sqrt')]\n"
GOOD = """
def score(trajectory): ...

@hookimpl
def rlcore_reward_functions():
    return [RewardFunction('fine', 'check_fine:score')]
"""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Path]:
    """A directory of packages that are installed for the test."""
    with importable(tmp_path / "site") as place:
        yield place


def checked(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, list[str]]]:
    """The exit code, and the problems by plugin."""
    code = main(["plugins", "--json", "--check", *arguments])
    return code, {row["name"]: row["problems"] for row in json.loads(capsys.readouterr().out)}


@pytest.mark.slow
def test_a_plugin_is_not_red_because_of_anothers_fault(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_package(site, "check_fine", HEAD + GOOD)
    write_package(site, "check_broken", "1 / 0")
    assert checked(capsys, "check_fine") == (0, {"check_fine": []})
    code, problems = checked(capsys, "check-broken")
    assert code == 2
    assert list(problems) == ["check_broken"]
    assert "ZeroDivisionError" in problems["check_broken"][0]
    code, problems = checked(capsys, "check_fine", "check_broken", "check_fine")
    assert (code, list(problems)) == (2, ["check_fine", "check_broken"])


@pytest.mark.slow
def test_a_file_is_checked_by_its_path_and_configurations_are_not_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "check_file.py"
    offers = "[RewardFunction('f', f'{__file__}:f'), RewardFunction('g', f'{__file__}:g')]"
    hook = f"@hookimpl\ndef rlcore_reward_functions(): return {offers}\n"
    path.write_text(f"RLCORE_API = '1'\n{HEAD}def f(trajectory): ...\n{hook}")
    config = tmp_path / "some.yaml"
    config.write_text(f"plugins: {{check_file: {{path: {path}}}}}\n")
    for arguments in ([str(path)], ["check_file", str(config)], ["check_file", f"plugins.check_file.path={path}"]):
        code, problems = checked(capsys, *arguments)
        assert code == 2
        assert "there is no 'g'" in problems["check_file"][0]


def test_an_unknown_name_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "--check", "nul"]) == 2
    assert "plugin 'nul' is not installed; did you mean 'null'?" in capsys.readouterr().err


FAULTS = {
    "def f(one, two): return make(one, two)": "",  # a factory, as far as one can see
    "def f(one, two): return lambda trajectory: one": "",
    "def f(one, two):\n    def score(trajectory): return 1.0\n    return score": "",
    "def f(one, two): return [1.0 for _ in one]": "(one, two), which takes nothing of a sample, and a call of it",
    "async def f(one, two): return make(one, two)": "(one, two), which takes nothing of a sample, and a call of it",
    "def f(one, /, two): return make": "reward function 'r': has the signature (one, two); accepted are",
    "def f(*, trajectory): ...": "",
    "def f(trajectory, threshold): ...": "",
    "def f(completions, answer, **more): ...": "",
    "f = lambda trajectory: 1": "is a lambda",
    "f = 3": "is neither a function",
    "class f:\n    def score(self, trajectory): ...": "",
    "class f:\n    def __init__(self, path): ...\n    def score(self, trajectory): ...": "",
    "class f: ...": "has no method score",
    "": "there is no 'f'",
    "import sys\ndef __getattr__(name): sys.exit(0)": "it called sys.exit(0)",
}


@pytest.mark.parametrize("source", FAULTS)
def test_the_signature_of_a_reward_function_is_read(site: Path, source: str) -> None:
    (site / "check_functions.py").write_text(source)
    write_package(
        site,
        "check_rewards",
        HEAD + "@hookimpl\ndef rlcore_reward_functions(): return [RewardFunction('r', 'check_functions:f')]\n",
    )
    problems = check_plugin("check_rewards").problems
    assert bool(problems) is bool(FAULTS[source]), problems
    for problem in problems:
        assert problem.startswith("plugin 'check_rewards' (check-rewards 1.0): ")
        assert FAULTS[source] in problem


def test_a_scope_that_the_signature_cannot_serve_is_a_problem(site: Path) -> None:
    source = """
    def f(trajectory): ...
    @hookimpl
    def rlcore_reward_functions(): return [RewardFunction('r', 'check_scope:f', Scope.GROUP)]
    """
    write_package(site, "check_scope", HEAD + dedent(source))
    (problem,) = check_plugin("check_scope").problems
    assert "plugin 'check_scope' (check-scope 1.0)" in problem
    assert "scope=group scores several samples in a call" in problem


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("check_absent:f", "there is no module 'check_absent'"),
        ("check_losses:absent", "defines no 'absent'"),
        ("check_losses:two", "takes (inputs, more); needs to take 1 argument by position"),
        ("check_losses:later", "is async def; needs a plain function"),
        ("check_losses:NUMBER", "is 3; needs a function"),
        ("check_exits:f", "it called sys.exit(0)"),
    ],
)
@pytest.mark.parametrize("field", ["target", "selection"])
def test_the_functions_of_an_algorithm_are_looked_at(site: Path, field: str, reference: str, message: str) -> None:
    (site / "check_losses.py").write_text(
        "NUMBER = 3\ndef f(inputs): ...\ndef two(inputs, more): ...\nasync def later(inputs): ..."
    )
    (site / "check_exits.py").write_text("import sys; sys.exit(0)\ndef f(inputs): ...")
    arguments = {"target": "check_losses:f", "selection": "", field: reference}
    write_package(
        site,
        "check_algorithms",
        HEAD + "@hookimpl\ndef rlcore_algorithms():\n"
        f"    return [Algorithm('a', AlgorithmKind.POLICY_LOSS, scope=Scope.SAMPLE, **{arguments})]\n",
    )
    (problem,) = check_plugin("check_algorithms").problems
    assert "plugin 'check_algorithms' (check-algorithms 1.0)" in problem
    assert message in problem


def test_an_algorithm_is_called_on_a_small_batch(site: Path) -> None:
    source = """
    def f(inputs): ...
    @hookimpl
    def rlcore_algorithms(): return [Algorithm('a', AlgorithmKind.ADVANTAGE, 'check_probed:f', Scope.GROUP)]
    """
    write_package(site, "check_probed", HEAD + dedent(source))
    (problem,) = check_plugin("check_probed").problems
    assert "algo.advantage=a of plugin 'check_probed' (check-probed 1.0): " in problem
    assert "it returned None; needs" in problem


@pytest.mark.fault
def test_a_check_that_hangs_names_the_line(
    site: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LIMIT, "1")
    noted = f"open({str(site / 'imports')!r}, 'a').write('once ')"
    write_package(site, "check_hangs", f"import time\ndef wait():\n    time.sleep(60)\n{noted}\nwait()\n")
    code, problems = checked(capsys, "check_hangs")
    assert code == 2
    file = site / "check_hangs.py"
    assert f"importing check_hangs: not done after 1 s, in wait at {file}:3" in problems["check_hangs"][0]
    assert (site / "imports").read_text() == "once "


@pytest.mark.fault
def test_a_check_that_no_signal_reaches_names_the_line(
    site: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LIMIT, "1")
    source = "import signal, time\nsignal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})\ntime.sleep(60)\n"
    write_package(site, "check_deaf", source)
    code, problems = checked(capsys, "check_deaf")
    assert code == 2
    expected = f"plugin 'check_deaf': its check was not done after 3 s, in <module> at {site / 'check_deaf.py'}:3"
    assert problems["check_deaf"] == [expected]


@pytest.mark.slow
def test_the_name_core_belongs_to_rlcore(site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PluginError, match="plugin 'core': the name belongs to rlcore itself"):
        load(["core"])
    path = tmp_path / "core.py"
    path.write_text("RLCORE_API = '1'")
    with pytest.raises(PluginError, match=f"plugin 'core' of {path}: the name belongs to rlcore itself"):
        load([str(path)])
    write_package(site, "check_taken", FINE, entry_points={"rlcore": {"core": "check_taken"}})
    with pytest.raises(PluginError, match="plugin 'core' of check-taken: the name belongs to rlcore itself"):
        load(["core"])
    code, problems = checked(capsys, "core")
    assert code == 2
    assert "give the plugin another name" in problems["core"][0]


def test_an_entry_point_that_names_no_function_does_not_disturb_others(site: Path) -> None:
    entry_points = {"rlcore.rewards": {"odd": "check_odd", "even": "check_odd:f"}}
    write_package(site, "check_odd", "def f(trajectory): ...", entry_points=entry_points)
    names = {offer.value.name for offer in load([]).entry_point_rewards()}
    assert "even" in names
    assert "odd" not in names


REWARDS = {
    "gone": ("check_own:g", "check_own:g"),
    "exact_match": ("check_own:f", "is also offered by plugin 'core' (rlcore 0.1.0), which has the name in every run"),
    "odd": ("check_own", "needs"),
}


@pytest.mark.parametrize("name", REWARDS)
def test_the_entry_points_of_a_plugins_package_are_checked_with_it(site: Path, name: str) -> None:
    target, problem = REWARDS[name]
    entries = {"rlcore": {"check_own": "check_own"}, "rlcore.rewards": {"fine": "check_own:f", name: target}}
    write_package(site, "check_own", HEAD + "def f(trajectory): ...\n", entry_points=entries)
    write_package(site, "check_other", "", entry_points={"rlcore.rewards": {"lost": "nowhere:f"}})
    (found,) = check_plugin("check_own").problems
    assert found.startswith(f"entry point '{name}' (check-own 1.0): ")
    assert problem in found


def test_the_entry_points_of_a_plugins_package_are_among_its_offers(site: Path) -> None:
    entries = {"rlcore": {"check_own": "check_own"}, "rlcore.rewards": {"fine": "check_own:f"}}
    write_package(site, "check_own", HEAD + "def f(trajectory): ...\n", entry_points=entries)
    hooks = load(["check_own"])
    assert offer_names(hooks, hooks.providers()[0]) == ["reward function fine"]
    assert check_plugin("check_own").ok


SECTIONS = {
    "x: Path = Path()": "'x' is Path, which config.yaml and plan.json cannot hold; needs str, or another of",
    "x: tuple[bytes, ...] = ()": "'x' is bytes, which config.yaml and plan.json cannot hold; needs str",
    "x: int = 'many'": "section type Settings: ValidationError: Value 'many'",
    "x: object = 3": "section type Settings: ValidationError: Unexpected type annotation: object",
    "x: 'Nowhere' = 3": "section type Settings: NameError: name 'Nowhere' is not defined",
}
DEFAULTS = {
    "{'actor.frobnicate': 1}": "one of its defaults is wrong: actor.frobnicate: unknown key",
    "{'train.max_steps': 'many'}": "train.max_steps: found 'many' .*needs a whole number",
    "{'plugins.null.update_s': 1}": "default 'plugins.null.update_s' is a plugin's setting",
}
SECTION = """
from dataclasses import dataclass
from pathlib import Path
from rlcore.config.providers import ConfigSection
@dataclass(frozen=True)
class Settings:
    {field}
@hookimpl
def rlcore_config_sections(): return [ConfigSection("check_section", Settings, {defaults})]
"""


@pytest.mark.parametrize(
    ("field", "defaults", "message"),
    [
        *((field, "{}", message) for field, message in SECTIONS.items()),
        *(("pass", *default) for default in DEFAULTS.items()),
    ],
)
def test_a_section_that_no_run_could_read_is_a_problem(site: Path, field: str, defaults: str, message: str) -> None:
    write_package(site, "check_section", HEAD + SECTION.format(field=field, defaults=defaults))
    (problem,) = check_plugin("check_section").problems
    assert "plugin 'check_section'" in problem
    assert re.search(message, problem)


def test_a_default_that_is_nan_is_set_by_one_plugin_only(site: Path) -> None:
    write_package(site, "check_section", HEAD + SECTION.format(field="pass", defaults="{'actor.lr': float('nan')}"))
    (problem,) = check_plugin("check_section").problems or ("",)
    assert "both set" not in problem


AGENT = "@hookimpl\ndef rlcore_agent_loops(): return [Component({name!r}, lambda context: None)] * {times}\n"


@pytest.mark.parametrize(("name", "times"), [("single_turn", 1), ("mine", 2)])
def test_a_name_that_could_not_be_chosen_is_a_problem(site: Path, name: str, times: int) -> None:
    write_package(site, "check_clash", HEAD + AGENT.format(name=name, times=times))
    (problem,) = check_plugin("check_clash").problems
    assert f"plugin 'check_clash' (check-clash 1.0): agent loop '{name}' is offered twice, by " in problem


@pytest.mark.slow
def test_what_a_plugin_writes_to_stdout_is_not_what_was_found(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = "import atexit, os\nos.write(1, b'{}\\xff')\natexit.register(print, 'bye')\n"
    write_package(site, "check_prints", HEAD + source + AGENT.format(name="single_turn", times=1))
    code, problems = checked(capsys, "check_prints")
    assert code == 2
    assert "agent loop 'single_turn' is offered twice" in problems["check_prints"][0]


LEFT_BEHIND = {
    "a process": "import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(20)'])\n",
    "a thread": "import threading, time\nthreading.Thread(target=time.sleep, args=(20,)).start()\n",
}


@pytest.mark.slow
@pytest.mark.parametrize("what", LEFT_BEHIND)
def test_a_check_does_not_wait_for_what_a_plugin_leaves_behind(
    site: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    write_package(site, "check_leaves", HEAD + LEFT_BEHIND[what] + AGENT.format(name="mine", times=1))
    began = time.monotonic()
    assert checked(capsys, "check_leaves") == (0, {"check_leaves": []})
    assert time.monotonic() - began < 20


def test_a_plugin_may_have_the_name_of_a_section_of_the_core(site: Path) -> None:
    write_package(site, "check_named", HEAD, entry_points={"rlcore": {"actor": "check_named"}})
    _, loaded = configure(
        [{"model": {"path": "x"}}], ["data.sources.a.path=x", "reward.functions.a.fn=gsm8k"], ["actor"]
    )
    assert loaded.config.plugins["actor"] == {}
