"""`rlcore plugins new NAME`: a package that works, with an example and a test of each kind of offer."""

import json
import keyword
import os
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rlcore.cli.arguments import Parser
from rlcore.cli.console import answer
from rlcore.cluster.interpreter import run_in_new_interpreter
from rlcore.errors import ConfigError, nearest

RANGE = "rlcore>=0.1,<0.2"
CHECK_S = 180.0
"""Seconds that each of the three commands may take."""
TRY: Mapping[str, Any] = {
    "model.path": "none",
    "model.tokenizer": "bytes",
    "data.sources.train.path": "prompts.jsonl",
    "actor.backend": "null",
    "rollout.backend": "null",
    "rollout.max_tokens": 8,
    "rollout.samples_per_prompt": 4,
    "train.prompts_per_step": 4,
    "train.max_steps": 2,
    "reward.functions.letters.fn": "rlcore.testing.letters:count_letter",
    "reward.functions.letters.children": 1,
}
"""The run of `try.yaml` without the plugin's offers: the policy of the plugin `null`."""

Offers = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class _Package:
    """The names of what is written."""

    name: str
    directory: Path
    offers: Offers
    """The chosen ones, by kind, in the order of the templates."""

    @property
    def enabled(self) -> tuple[str, ...]:
        """The plugins of its trial run."""
        return ("null", *dict.fromkeys(offer["plugin"] for offer in self.offers.values() if "plugin" in offer))


def run(arguments: Sequence[str]) -> int:
    """Write the package, run its three commands, and print them."""
    known = _known()
    parser = Parser("plugins new", "Write a plugin that works: an example and a test of each kind of offer.")
    parser.add_argument("name", metavar="NAME", help="the plugin's name; a Python identifier")
    parser.add_argument("--offers", default="reward", metavar="KIND,...", help=f"of: {', '.join(known)}")
    parser.add_argument("--into", default=".", metavar="PATH", help="directory to write rlcore-NAME into")
    parsed = parser.parse(arguments)
    _check_name(parsed.name)
    package = _Package(parsed.name, _directory(parsed.name, Path(parsed.into)), _chosen(parsed.offers, known))
    _write(package)
    try_command = f"rlcore train try.yaml {_enable(package)}"
    _try(package)
    answer(f"wrote {package.directory}: {', '.join(sorted(path.name for path in package.directory.iterdir()))}")
    answer(f"first: cd {package.directory} && pip install -e '.[test]'")
    answer("next (these were run just now, with the package on PYTHONPATH instead of installed):")
    for command in ("python -m pytest -q tests", f"rlcore plugins --check {package.name}", try_command):
        answer(f"  {command}")
    return 0


def _template(name: str) -> str:
    return files("rlcore.cli").joinpath("templates", "plugin", name).read_text("utf-8")


def _known() -> Offers:
    return tomllib.loads(_template("offers.toml"))


def _check_name(name: str) -> None:
    """ConfigError for a name that a package, an entry point and a configuration key cannot all have."""
    if not name.isidentifier() or keyword.iskeyword(name) or name != name.lower() or not name.isascii():
        raise ConfigError(
            f"plugins new: '{name}' is not a lower-case Python identifier; needs letters a-z, digits and '_' only, not "
            "beginning with a digit"
        )
    if name in sys.stdlib_module_names:
        raise ConfigError(
            f"plugins new: '{name}' is a module of the standard library; choose another name, such as {name}_reward"
        )
    from rlcore.plugins import installed
    from rlcore.plugins.discover import check_not_core

    check_not_core(name, [])
    for plugin in installed():
        if plugin.name == name:
            raise ConfigError(f"plugins new: {plugin.provider} is installed; choose another name than '{name}'")


def _directory(name: str, into: Path) -> Path:
    """The directory to make; ConfigError where that is impossible."""
    if not into.is_dir():
        raise ConfigError(f"plugins new: there is no directory '{into}' to write into; make it first")
    if not os.access(into, os.W_OK | os.X_OK):
        raise ConfigError(f"plugins new: directory '{into}' is not writable; choose another with --into")
    directory = into / f"rlcore-{name.replace('_', '-')}"
    if directory.exists() or directory.is_symlink():
        raise ConfigError(f"plugins new: '{directory}' exists; choose another name, or remove it")
    return directory


def _chosen(text: str, known: Offers) -> Offers:
    """The chosen kinds. With those that no hook offers, such as a tool, comes a reward: a plugin needs a hook."""
    kinds = {kind.strip() for kind in text.split(",")}
    for kind in sorted(kinds - set(known)):
        raise ConfigError(f"plugins new: there is no template for the offer '{kind}'; {nearest(kind, tuple(known))}")
    chosen = {kind: offer for kind, offer in known.items() if kind in kinds}
    if len({kind for kind in chosen if kind in ("agent", "tool", "environment")}) > 1 and "agent" in chosen:
        raise ConfigError(
            "plugins new: an agent loop cannot stand beside a tool or an environment, which belong to another "
            "plugin's loop; choose one of the two"
        )
    foreign = {kind: offer["plugin"] for kind, offer in chosen.items() if "plugin" in offer}
    for kind, plugin in foreign.items():
        if find_spec(f"rlcore_{plugin}") is None:
            raise ConfigError(
                f"plugins new: the offer '{kind}' needs the plugin {plugin}, which is not installed; "
                f"pip install rlcore-{plugin.replace('_', '-')}"
            )
    hookless = any("hook" not in offer for offer in chosen.values())
    return {"reward": known["reward"], **chosen} if hookless else chosen


def _enable(package: _Package) -> str:
    return " ".join(f"--plugin {plugin}" for plugin in (*package.enabled, package.name))


def _write(package: _Package) -> None:
    import yaml

    distribution = package.name.replace("_", "-")
    requires = [RANGE, *dict.fromkeys(offer["requires"] for offer in package.offers.values() if "requires" in offer)]
    values = {
        "name": package.name,
        "distribution": distribution,
        "summary": ", ".join(offer["summary"] for offer in package.offers.values()),
        "requires": ", ".join(f'"{requirement}"' for requirement in requires),
        "enable": _enable(package),
    }
    module = f"rlcore_{package.name}"
    texts = {name: _template(f"{name}.txt") for name in ("pyproject.toml", "Makefile", "README.md", "AGENTS.md")}
    texts[".github/workflows/ci.yml"] = _template("ci.yml.txt")
    texts[f"{module}/__init__.py"] = _declarations(package)
    texts[f"{module}/py.typed"] = ""
    for kind in package.offers:
        texts[f"{module}/{kind}.py"] = _template(f"{kind}.py.txt")
        texts[f"tests/test_{kind}.py"] = _template(f"test_{kind}.py.txt")
    texts["try.yaml"] = yaml.safe_dump(_nested(package), sort_keys=False)
    rows = [{"prompt": f"Say something, number {number}.", "answer": str(number)} for number in range(16)]
    texts["prompts.jsonl"] = "".join(json.dumps(row) + "\n" for row in rows)
    for name, text in texts.items():
        path = package.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_filled(text, values), "utf-8")


def _filled(text: str, values: Mapping[str, str]) -> str:
    for key, value in values.items():
        text = text.replace(f"@{key}@", value)
    return text


def _declarations(package: _Package) -> str:
    """The plugin's module: one hook for all offers of a kind."""
    offers: dict[tuple[str, str, str], list[str]] = {}
    imports = {"from rlcore.contracts.hooks import hookimpl"}
    for offer in package.offers.values():
        if "hook" in offer:
            signature = (offer["hook"], offer.get("parameters", ""), offer["returns"])
            offers.setdefault(signature, []).append(offer["offer"])
            imports |= set(offer["imports"])
        if "worker" in offer:
            offers.setdefault(("rlcore_worker_classes", "", "WorkerClass"), []).append(offer["worker"])
    own = sorted(line for line in imports if "@name@" in line)
    lines = ['"""An rlcore plugin: @summary@."""', "", "from collections.abc import Sequence", ""]
    lines += [*sorted(imports - set(own)), *([""] if own else []), *own]
    for (hook, parameters, returns), values in offers.items():
        lines += ["", "", "@hookimpl", f"def {hook}({parameters}) -> Sequence[{returns}]:"]
        if len(values) == 1:
            lines.append(f"    return [{values[0]}]")
        else:
            lines += ["    return [", *(f"        {value}," for value in values), "    ]"]
    return "\n".join(lines) + "\n"


def _nested(package: _Package) -> dict[str, Any]:
    """The settings of the trial run, by section."""
    settings = dict(TRY)
    for offer in package.offers.values():
        settings |= offer["settings"]
    nested: dict[str, Any] = {}
    for key, value in settings.items():
        *path, last = key.split(".")
        place = nested
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return nested


def _try(package: _Package) -> None:
    """Runs the tests, the check and the training; ConfigError with the last line of the one that fails."""
    with TemporaryDirectory(prefix="rlcore-new-") as site:
        info = Path(site) / f"rlcore_{package.name}-0.1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: rlcore-{package.name}\nVersion: 0.1.0\nRequires-Dist: {RANGE}\n", "utf-8"
        )
        (info / "entry_points.txt").write_text(f"[rlcore]\n{package.name} = rlcore_{package.name}\n", "utf-8")
        paths = [site, str(package.directory.absolute()), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
        run_dir = f"train.dir={site}/run"
        enable = _enable(package).split()
        for command in (
            ["pytest", "-q", "-p", "no:cacheprovider", "tests"],
            ["rlcore", "plugins", "--check", package.name],
            ["rlcore", "train", "try.yaml", *enable, run_dir],
        ):
            _run(package, command, environment)


def _run(package: _Package, command: Sequence[str], environment: Mapping[str, str]) -> None:
    who = f"plugins new: wrote '{package.directory}', where '{' '.join(command[:3])}'"
    if command[0] == "pytest" and find_spec("pytest") is None:
        raise ConfigError(f"{who} was not run: pytest is not installed; pip install pytest, then run it there")
    code = (
        f"import os, runpy, sys; os.chdir({str(package.directory)!r}); os.environ |= {dict(environment)!r}\n"
        f"sys.path[:0] = os.environ['PYTHONPATH'].split(os.pathsep); sys.argv = {list(command)!r}\n"
        f"runpy.run_module({command[0]!r}, run_name='__main__', alter_sys=True)"
    )
    done = run_in_new_interpreter(code, CHECK_S)
    if done is None:
        raise ConfigError(f"{who} was not done after {CHECK_S:g} s")
    if done.code:
        lines = (done.errors.strip() or done.output.strip()).splitlines() or ["it said nothing"]
        named = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        raise ConfigError(f"{who} ended with {done.code}: {(named or lines)[-1]}")
