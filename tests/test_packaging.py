"""Distributions, constraints, Makefile and CI say the same thing as each other and as the tree."""

import re
import runpy
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).parent.parent
PLUGINS = sorted(path.parent for path in (ROOT / "plugins").glob("*/pyproject.toml"))
EXAMPLES = sorted(path.parent for path in (ROOT / "examples").glob("*/plugin/pyproject.toml"))
OTHERS = [*PLUGINS, *EXAMPLES]
VIEW = ROOT / "view"
MAKEFILE = (ROOT / "Makefile").read_text()
CI = (ROOT / ".ci" / "run").read_text()
CI_MINUTES = 90


def project(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((directory / "pyproject.toml").read_text())
    return found


def name_of(directory: Path) -> str:
    return str(directory.relative_to(ROOT))


def pinned(file: str = "cpu.txt") -> dict[str, Version]:
    lines = (ROOT / "requirements" / file).read_text().splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonical(name): Version(version) for name, version in pins}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements(left_out: tuple[str, ...] = ("engine", "verifiers")) -> Iterator[Requirement]:
    """The requirements of all distributions but those of some extras: these have separate files of versions."""
    for directory in [ROOT, VIEW, *OTHERS]:
        data = project(directory)["project"]
        extras = data.get("optional-dependencies", {})
        lists = [extra for name, extra in extras.items() if name not in left_out]
        for text in [*data["dependencies"], *(text for entry in lists for text in entry)]:
            requirement = Requirement(text)
            if not requirement.name.startswith("rlcore"):
                yield requirement


def test_there_are_five_plugins_and_an_example() -> None:
    assert [plugin.name for plugin in PLUGINS] == ["agent_loop", "critic_engine", "ray", "reward_loop", "vllm"]
    assert [name_of(example) for example in EXAMPLES] == ["examples/arithmetic/plugin"]


@pytest.mark.parametrize("directory", OTHERS, ids=name_of)
def test_a_plugin_is_a_separate_distribution(directory: Path) -> None:
    data = project(directory)
    [package] = data["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    [entry] = data["project"]["entry-points"]["rlcore"].items()
    assert entry[1] == package
    assert data["project"]["name"] == package.replace("_", "-")
    if directory in PLUGINS:
        assert entry[0] == directory.name
    assert (directory / package / "py.typed").is_file()
    assert (directory / "README.md").is_file()
    assert list((directory / "tests").glob("test_*.py"))


@pytest.mark.parametrize("directory", OTHERS, ids=name_of)
def test_a_plugin_says_which_versions_of_the_core_it_is_for(directory: Path) -> None:
    data, core = project(directory)["project"], project(ROOT)["project"]
    [needed] = [dependency for dependency in map(Requirement, data["dependencies"]) if dependency.name == "rlcore"]
    assert needed.specifier == SpecifierSet(">=0.1,<0.2")
    assert Version(core["version"]) in needed.specifier
    assert data["requires-python"] == core["requires-python"]
    assert data["license"] == core["license"] == "Apache-2.0"


@pytest.mark.parametrize("directory", [ROOT, VIEW, *PLUGINS], ids=lambda path: path.name)
def test_the_metadata_of_every_distribution_is_complete_and_of_one_version(directory: Path) -> None:
    data, core = project(directory)["project"], project(ROOT)["project"]
    for key in ("version", "authors", "classifiers", "license", "license-files", "requires-python"):
        assert data[key] == core[key], key
    assert data["keywords"]
    assert (directory / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    for minor in (11, 12, 13):
        assert f"Programming Language :: Python :: 3.{minor}" in data["classifiers"]


def test_the_viewer_needs_neither_rlcore_nor_any_other_package() -> None:
    data = project(VIEW)["project"]
    assert data["dependencies"] == []
    assert (data["version"], data["requires-python"]) == tuple(
        project(ROOT)["project"][key] for key in ("version", "requires-python")
    )
    for file in (VIEW / "rlcore_view").rglob("*.py"):
        modules = re.findall(r"^\s*(?:from|import) (\w+)", file.read_text(), re.MULTILINE)
        assert set(modules) <= {*sys.stdlib_module_names, "rlcore_view", "pyarrow"}, file


@pytest.mark.parametrize("directory", PLUGINS, ids=name_of)
def test_a_plugin_imports_no_other_plugin_and_no_private_name_of_the_core(directory: Path) -> None:
    others = [f"rlcore_{plugin.name}" for plugin in PLUGINS if plugin != directory]
    for file in directory.rglob("*.py"):
        text = file.read_text()
        assert not [other for other in others if re.search(rf"\b{other}\b", text)], file
        imports = re.findall(r"^\s*(?:from|import) (rlcore(?:\.\w+)*)(?: import (.*))?$", text, re.MULTILINE)
        assert not [name for name in imports if re.search(r"(^|[\s.,])_", " ".join(name))], file


def test_everything_that_is_needed_is_pinned_to_a_version_that_will_do() -> None:
    pins = pinned()
    for requirement in requirements():
        version = pins[canonical(requirement.name)]
        assert version in requirement.specifier, requirement


def test_the_oldest_versions_that_are_tested_are_the_oldest_that_are_declared() -> None:
    declared = {}
    for requirement in requirements(("engine", "verifiers", "dev")):
        [floor] = [Version(part.version) for part in requirement.specifier if part.operator == ">="]
        assert declared.setdefault(canonical(requirement.name), floor) == floor, requirement
    assert pinned("oldest.txt") == declared


def test_what_the_agent_loop_needs_for_verifiers_is_pinned_in_a_separate_file() -> None:
    pins = pinned("verifiers.txt")
    needed = project(ROOT / "plugins" / "agent_loop")["project"]["optional-dependencies"]["verifiers"]
    for requirement in map(Requirement, needed):
        assert pins[canonical(requirement.name)] in requirement.specifier, requirement


def test_the_pins_are_final_releases_and_torch_is_for_every_machine() -> None:
    pins = pinned()
    # Parts of OpenTelemetry are published as pre-releases only.
    assert [n for n, v in pins.items() if v.is_prerelease and not n.startswith("opentelemetry-")] == []
    # A local version such as 2.13.0+cpu exists in one index only; without it the constraint holds for all of them.
    assert [name for name, version in pins.items() if version.local] == []
    assert pins["torch"] == Version("2.13.0")


def test_make_test_runs_the_tests_of_every_distribution() -> None:
    [plugins] = re.findall(r"^PLUGINS := (.*)$", MAKEFILE, re.MULTILINE)
    assert sorted(plugins.split()) == [name_of(plugin) for plugin in PLUGINS]
    first = "tests $(addsuffix /tests,$(PLUGINS)) $(VIEW)/tests"
    assert f"TESTS := {first} $(EXAMPLE)/plugin/tests examples/plugins\n" in MAKEFILE
    assert "EXAMPLE := examples/arithmetic\n" in MAKEFILE


def test_ci_calls_targets_that_exist_and_fits_into_its_time() -> None:
    steps = re.findall(r"^(?:step|step_if_time|with_next) (\S+) (\d+) make (\S+)(?: ARGS=.*)?$", CI, re.MULTILINE)
    names = "setup types lint docs setup-vllm test fault real outsider test-optimized browser slow vllm"
    assert [name for name, _, _ in steps] == names.split()
    for name, _, target in steps:
        assert name == target
        assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE), target
    [end] = re.findall(r"^END=(\d+)$", CI, re.MULTILINE)
    assert int(end) < CI_MINUTES * 60
    assert all(int(seconds) < int(end) / 2 for _, seconds, _ in steps)
    assert re.findall(r"^with_next (\S+)", CI, re.MULTILINE) == re.findall(r"^joined (\S+)", CI, re.MULTILINE)


def summary_of(steps: str, directory: Path) -> tuple[int, list[list[str]]]:
    """Exit code, and the first words of the summary's lines, of `.ci/run` with these steps."""
    before, _, after = CI.partition("# Four environments")
    script = directory / ".ci" / "run"
    script.parent.mkdir(parents=True)
    script.write_text(before + steps + after[after.index('echo "=== summary"') :])
    done = subprocess.run(["bash", script], capture_output=True, text=True, timeout=30, check=False)
    _, _, lines = done.stdout.partition("=== summary\n")
    return done.returncode, [line.split()[:4] for line in lines.splitlines()]


@pytest.mark.slow
def test_a_step_for_which_no_time_is_left_has_failed_and_the_next_is_run(tmp_path: Path) -> None:
    steps = "END=$((SECONDS + 1))\nstep late 60 sleep 20\nEND=900\nstep good 60 true\n"
    code, (late, (*good, seconds, unit)) = summary_of(steps, tmp_path)
    assert (code, late, good, unit) == (1, ["FAILED", "late", "(exit", "124,"], ["ok", "good"], "s)")
    assert int(seconds.removeprefix("(")) < 60


def test_a_last_step_is_left_out_in_words_when_its_limit_is_more_than_the_time_left(tmp_path: Path) -> None:
    steps = "END=$((SECONDS + 90))\nstep_if_time long 100 false\nstep_if_time short 60 true\n"
    code, [left_out, done] = summary_of(steps, tmp_path)
    assert (code, left_out[:3], done[:2]) == (0, ["left", "out", "long"], ["ok", "short"])
    assert 80 <= int(left_out[3][1:]) <= 90  # the seconds that are left
    assert summary_of("END=900\nstep_if_time bad 60 false\n", tmp_path / "b") == (1, [["FAILED", "bad", "(exit", "1,"]])


def test_a_step_at_the_time_of_another_counts(tmp_path: Path) -> None:
    begun = "with_next good 60 bash -c 'sleep 2'\nwith_next bad 60 bash -c 'exit 3'\nstep alone 60 true\n"
    code, [alone, good, bad] = summary_of(f"END=900\n{begun}joined good\njoined bad\n", tmp_path / "a")
    assert (code, alone[:2], good[:2], bad) == (1, ["ok", "alone"], ["ok", "good"], ["FAILED", "bad", "(exit", "3,"])
    late = "END=$((SECONDS + 1))\nwith_next late 60 sleep 20\njoined late\n"
    assert summary_of(late, tmp_path / "b") == (1, [["FAILED", "late", "(exit", "124,"]])
    killed = "with_next killed 60 true\nwait\nrm $logs/killed.status\njoined killed\n"
    assert summary_of(f"END=900\n{killed}", tmp_path / "c") == (1, [["FAILED", "killed", "(exit", "1,"]])


def test_commands_in_the_guides_for_agents_and_contributors_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):.*##", MAKEFILE, re.MULTILINE))
    for name in ("AGENTS.md", "CONTRIBUTING.md", "README.md"):
        commands = re.findall(r"(?:^|`)make ([a-z-]+(?: [a-z-]+)*)", (ROOT / name).read_text(), re.MULTILINE)
        assert {word for words in commands for word in words.split()} <= targets, name


def test_the_versions_agree_and_the_changelog_has_the_current_one() -> None:
    version = project(ROOT)["project"]["version"]
    assert f'__version__ = "{version}"' in (ROOT / "rlcore" / "__init__.py").read_text()
    assert f"\n## {version}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_hosted_workflow_runs_targets_that_exist_on_every_python() -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    [versions] = re.findall(r"versions: \[(.*)\]", workflow)
    for target in [*re.findall(r"- run: make ([a-z ]+)$", workflow, re.MULTILINE), versions.replace(",", "")]:
        for name in target.split():
            assert re.search(rf"^{name}:", MAKEFILE, re.MULTILINE), name
    assert re.findall(r'"(3\.\d+)"', workflow) == ["3.11", "3.12", "3.13"]


UNPUBLISHED = re.compile(r"pip install (-U )?'?rlcore\b(?!_)")
"""A command that needs an index with rlcore."""


def test_no_text_tells_anybody_to_install_from_an_index_what_is_not_there() -> None:
    suffixes = {".py", ".toml", ".json", ".md", ".ipynb", ".yaml"}
    places = (
        "rlcore",
        "plugins",
        "view",
        "examples",
        "benchmarks",
        "docs",
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
    )
    listed = subprocess.run(["git", "ls-files", *places], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [ROOT / name for name in listed.splitlines() if Path(name).suffix in suffixes]
    assert len(files) > 700
    assert [path.relative_to(ROOT) for path in files if UNPUBLISHED.search(path.read_text("utf-8"))] == []


@pytest.mark.parametrize(
    ("arguments", "has_gpu", "option"),
    [([], False, True), ([], True, False), (["--cpu"], True, True)],
)
def test_torch_is_the_cpu_build_on_machines_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    has_gpu: bool,
    option: bool,
) -> None:
    monkeypatch.setattr(urllib.request, "urlopen", lambda url, timeout: nullcontext(SimpleNamespace(status=200)))
    monkeypatch.setattr(Path, "exists", lambda path: has_gpu)
    monkeypatch.setattr(sys, "argv", ["torch_index.py", *arguments])
    runpy.run_path(str(ROOT / "requirements" / "torch_index.py"))
    assert ("--extra-index-url" in capsys.readouterr().out) is option
