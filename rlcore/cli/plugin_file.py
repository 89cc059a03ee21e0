"""Plugins in one file: `rlcore plugins new NAME --file` writes one, `rlcore plugins package FILE` packages it."""

import ast
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rlcore.cli.arguments import Parser
from rlcore.cli.plugin_package import (
    TRY,
    Offers,
    PluginPackage,
    check_name,
    common_texts,
    declared_hooks,
    free_place,
    new_directory,
    run_command,
    show_commands,
    template,
    try_package,
    write_texts,
)
from rlcore.errors import ConfigError

if TYPE_CHECKING:
    from rlcore.plugins import Hooks

FILE_KINDS = ("reward", "agent", "tracker", "cluster")
"""Kinds of offers that `--file` writes: those whose example imports no torch, which planning would load."""
API_LINE = re.compile(r"^RLCORE_API\b.*\n+", re.MULTILINE)


def write_file(name: str, into: Path, offers: Offers) -> None:
    """Write NAME.py with an example of each kind, check it, train with it, and print the commands."""
    for kind in offers:
        if kind not in FILE_KINDS:
            raise ConfigError(
                f"plugins new: --file has no template for the offer '{kind}'; choose from: {', '.join(FILE_KINDS)}; or "
                "leave --file out"
            )
    path = free_place(into, f"{name}.py")
    path.write_text(file_text(name, offers), "utf-8")
    check = ["rlcore", "plugins", "--check", f"{name}.py"]
    train = ["rlcore", "train", "--plugin", "null", "--plugin", f"{name}.py", *_overrides(name, offers)]
    with TemporaryDirectory(prefix="rlcore-new-") as runs:
        for command in (check, [*train, f"train.dir={runs}"]):
            run_command(path, into, command, {"PYTHONDONTWRITEBYTECODE": "1"})
    show_commands(path, [shlex.join(check), shlex.join(train), f"rlcore plugins package {name}.py"], 2)


def file_text(name: str, offers: Offers) -> str:
    """The module: what the files of a package hold, one after another, and the hooks."""
    statements = ["from collections.abc import Sequence", "from rlcore.contracts.hooks import hookimpl"]
    bodies = []
    for kind, offer in offers.items():
        source = template(f"{kind}.py.txt")
        tree = ast.parse(source)
        found = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
        statements += [ast.unparse(node) for node in found] + list(offer.get("imports", ()))
        last = max((node.end_lineno or 0 for node in [tree.body[0], *found]), default=0)
        bodies.append("\n".join(source.splitlines()[last:]).strip())
    lines = _joined(line for line in statements if "@name@" not in line)
    standard = [line for line in lines if line.split()[1].split(".")[0] in sys.stdlib_module_names]
    others = [line for line in lines if line not in standard]
    hooks = re.sub(r'"rlcore_@name@\.\w+:(\w+)"', r'f"{__file__}:\1"', "\n".join(declared_hooks(offers)).strip())
    head = f'"""An rlcore plugin in one file: {", ".join(offer["summary"] for offer in offers.values())}."""'
    parts = [head, "\n".join(standard), "\n".join(others), 'RLCORE_API = "1"']
    return ("\n\n".join(parts) + "\n\n\n" + "\n\n\n".join([*bodies, hooks]) + "\n").replace("@name@", name)


def _joined(statements: Iterable[str]) -> list[str]:
    """Import statements, one per module, `import x` first."""
    plain, names = set[str](), dict[str, set[str]]()
    for statement in statements:
        words = statement.split(" import ")
        if len(words) == 1:
            plain.add(statement)
        else:
            names.setdefault(words[0], set()).update(words[1].split(", "))
    joined = [f"{module} import {', '.join(sorted(found))}" for module, found in sorted(names.items())]
    return [*sorted(plain), *joined]


def _overrides(name: str, offers: Offers) -> list[str]:
    """The settings of a run with the offers, without a file of prompts."""
    settings: dict[str, Any] = dict(TRY)
    settings["data.sources.train.path"] = str(files("rlcore.testing").joinpath("null_prompts.jsonl"))
    for offer in offers.values():
        settings |= offer["settings"]
    texts = {key: f"[{','.join(value)}]" if isinstance(value, list) else value for key, value in settings.items()}
    return [f"{key}={value}".replace("@name@", name) for key, value in texts.items()]


def run(arguments: Sequence[str]) -> int:
    """Write the package of a plugin in one file, run its commands, and print them."""
    parser = Parser("plugins package", "Make a package of a plugin in one file, with a test per offer.")
    parser.add_argument("file", metavar="FILE", help="a .py file that `--plugin FILE` enables; it stays as it is")
    parser.add_argument("--into", default=".", metavar="PATH", help="directory to write rlcore-NAME into")
    parsed = parser.parse(arguments)
    file = Path(parsed.file)
    if file.suffix != ".py" or not file.is_file():
        raise ConfigError(f"plugins package: '{file}' is not a .py file; needs a plugin in one file")
    check_name(file.stem)
    offers = _offers_of(file)
    package = PluginPackage(file.stem, new_directory(file.stem, Path(parsed.into)), {"file": offers})
    module = f"rlcore_{file.stem}"
    texts = common_texts(package) | {
        f"{module}/__init__.py": packaged(file.read_text("utf-8"), file.stem),
        f"tests/test_{file.stem}.py": offers["tests"],
    }
    write_texts(package, texts)
    try_package(package)
    show_commands(package.directory, package.commands, 3)
    return 0


def packaged(source: str, name: str) -> str:
    """The source as the module of a package: without RLCORE_API, and targets in it name the module."""
    here = rf"\{{__file__\}}|(?:[^\"'\s]*/)?{name}\.py|{name}|rlcore_file_{name}"
    return re.sub(rf"f?([\"'])(?:{here}):([\w.]+)\1", rf'"rlcore_{name}:\2"', API_LINE.sub("", source))


def _offers_of(file: Path) -> Mapping[str, Any]:
    """Summary, settings and tests of a plugin's offers; ConfigError where there are none."""
    from rlcore.cli.plugins import offer_names
    from rlcore.plugins import load

    hooks = load([str(file)])
    [provider] = hooks.providers()
    names = offer_names(hooks, provider)
    if not names:
        raise ConfigError(
            f"plugins package: '{file}' offers nothing; needs a hook that returns an offer, such as "
            "rlcore_reward_functions"
        )
    settings, tests = _uses(hooks, file.stem)
    return {"summary": ", ".join(names), "settings": settings, "tests": "\n".join(tests) + "\n"}


def _uses(hooks: "Hooks", name: str) -> tuple[dict[str, Any], list[str]]:
    """The settings that use the offers of a plugin, and the lines of their tests."""
    settings: dict[str, Any] = {}
    suites: list[tuple[str, str, str]] = []
    """Of each offer: its suite, its name and its target."""
    for reward in (offer.value for offer in hooks.reward_functions() if offer.provider.plugin == name):
        settings[f"reward.functions.{reward.name}.fn"] = reward.name
        suites.append(("RewardFunctionSuite", reward.name, f'"rlcore_{name}:{reward.target.rpartition(":")[2]}"'))
    for algorithm in (offer.value for offer in hooks.algorithms() if offer.provider.plugin == name):
        settings[f"algo.{algorithm.kind}"] = algorithm.name
        suite = "AdvantageEstimatorSuite" if algorithm.kind == "advantage" else "PolicyLossSuite"
        suites.append((suite, algorithm.name, _named("rlcore_algorithms", algorithm.name)))
    for agent in (offer.value for offer in hooks.agent_loops() if offer.provider.plugin == name):
        settings["rollout.agent"] = agent.name
        suites.append(("AgentLoopSuite", agent.name, f"{_named('rlcore_agent_loops', agent.name)}.build"))
    for cluster in (offer.value for offer in hooks.clusters() if offer.provider.plugin == name):
        settings["cluster.backend"] = cluster.name
        suites.append(("ClusterSuite", cluster.name, _named("rlcore_clusters", cluster.name)))
    for tracker in (offer.value for offer in hooks.trackers() if offer.provider.plugin == name):
        settings["track.to"] = [*settings.get("track.to", ()), tracker.name]
        suites.append(("TrackerSuite", tracker.name, _named("rlcore_trackers", tracker.name)))
    return settings, _tests(name, suites)


def _named(hook: str, name: str) -> str:
    return f'{{offer.name: offer for offer in {hook}()}}["{name}"]'


def _tests(name: str, suites: Sequence[tuple[str, str, str]]) -> list[str]:
    hooks = sorted({found for _, _, target in suites for found in re.findall(r"rlcore_\w+(?=\(\))", target)})
    lines = ['"""The offers keep their contracts."""', ""]
    used = sorted({suite for suite, _, _ in suites})
    lines += [f"from rlcore.testing import {', '.join([*used, 'check_plugin'])}"]
    lines += ["", f"from rlcore_{name} import {', '.join(hooks)}"] if hooks else []
    lines += ["", "", "def test_the_plugin_keeps_its_contract():", f'    assert check_plugin("{name}").problems == ()']
    for suite, offered, target in suites:
        words = "".join(word.capitalize() for word in re.findall(r"[A-Za-z0-9]+", offered))
        lines += ["", "", f"class Test{words}{suite.removesuffix('Suite')}({suite}):", f"    target = {target}"]
    return lines
