"""The package of a plugin: its files from templates, and its three commands."""

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

from rlcore.cli.console import answer
from rlcore.cli.plugin_trial import run_trial
from rlcore.errors import ConfigError, nearest, shown
from rlcore.plan.catalog import install_hint

RANGE = "rlcore>=0.1,<0.2"
MAX_NAME = 100
"""Most letters of a name, which is part of names of files."""
TRIAL_ENVIRONMENT = {"PYTHONDONTWRITEBYTECODE": "1"}
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
"""The settings of `try.yaml` without the plugin's offers, with the policy of the plugin `null`."""

LETTERS = "reward.functions.letters."
"""Keys of the reward of a trial run whose offers include no other."""
Offers = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class PluginPackage:
    """A package to write."""

    name: str
    directory: Path
    offers: Offers
    """The chosen offers, by kind, in the order of the templates."""

    @property
    def enabled(self) -> tuple[str, ...]:
        """The plugins of its trial run."""
        return plugins_of(self.offers)

    @property
    def commands(self) -> list[str]:
        """The commands that are run in the package."""
        train = f"rlcore train try.yaml {enabling(self)}"
        return ["python -m pytest -q tests", f"rlcore plugins --check {self.name}", train]


def plugins_of(offers: Offers) -> tuple[str, ...]:
    """The plugins that a trial run with the offers enables in addition to theirs."""
    return ("null", *dict.fromkeys(offer["plugin"] for offer in offers.values() if "plugin" in offer))


def template(name: str) -> str:
    return files("rlcore.cli").joinpath("templates", "plugin", name).read_text("utf-8")


def known_offers() -> Offers:
    return tomllib.loads(template("offers.toml"))


def check_identifier(name: str) -> None:
    """ConfigError for a name that is not valid for a module."""
    if not name.isidentifier() or keyword.iskeyword(name) or name != name.lower() or not name.isascii():
        raise ConfigError(
            f"plugins: '{name}' is not a lower-case Python identifier; needs letters a-z, digits and '_' only, not "
            "beginning with a digit"
        )


def check_name(name: str) -> None:
    """ConfigError for a name that is not valid for a package, an entry point and a configuration key."""
    check_identifier(name)
    if len(name) > MAX_NAME:
        raise ConfigError(f"plugins: {shown(name)} has {len(name)} letters; needs a name of at most {MAX_NAME}")
    if name in sys.stdlib_module_names:
        raise ConfigError(
            f"plugins: '{name}' is a module of the standard library; choose another name, such as {name}_reward"
        )
    from rlcore.plugins import installed
    from rlcore.plugins.discover import check_not_core

    check_not_core(name, [])
    for plugin in installed():
        if plugin.name == name:
            raise ConfigError(f"plugins: {plugin.provider} is installed; choose another name than '{name}'")


def new_directory(name: str, into: Path) -> Path:
    """The directory of a new package; ConfigError like `free_place`."""
    return free_place(into, f"rlcore-{name.replace('_', '-')}")


def free_place(into: Path, name: str) -> Path:
    """The path of a new file or directory; ConfigError if it cannot be created."""
    if not into.is_dir():
        raise ConfigError(f"plugins: '{into}' is not a directory to write into; make it first")
    if not os.access(into, os.W_OK | os.X_OK):
        raise ConfigError(f"plugins: directory '{into}' is not writable; choose another with --into")
    place = into / name
    if place.exists() or place.is_symlink():
        raise ConfigError(f"plugins: '{place}' exists; choose another name, or remove it")
    return place


def chosen_offers(text: str, known: Offers) -> Offers:
    """The chosen kinds. Adds a reward to kinds that no hook offers, such as a tool, because a plugin needs a hook."""
    kinds = {kind.strip() for kind in text.split(",")}
    for kind in sorted(kinds - set(known)):
        raise ConfigError(f"plugins: the offer '{kind}' has no template; {nearest(kind, tuple(known))}")
    chosen = {kind: offer for kind, offer in known.items() if kind in kinds}
    if len({kind for kind in chosen if kind in ("agent", "tool", "environment")}) > 1 and "agent" in chosen:
        raise ConfigError(
            "plugins: an agent loop cannot be combined with a tool or an environment, which belong to another "
            "plugin's loop; choose one of the two"
        )
    foreign = {kind: offer["plugin"] for kind, offer in chosen.items() if "plugin" in offer}
    for kind, plugin in foreign.items():
        if find_spec(f"rlcore_{plugin}") is None:
            raise ConfigError(
                f"plugins: the offer '{kind}' needs the plugin {plugin}, which is not installed; {install_hint(plugin)}"
            )
    hookless = any("hook" not in offer for offer in chosen.values())
    return {"reward": known["reward"], **chosen} if hookless else chosen


def enabling(package: PluginPackage) -> str:
    return " ".join(f"--plugin {plugin}" for plugin in (*package.enabled, package.name))


def package_texts(package: PluginPackage) -> dict[str, str]:
    """The files of a package with an example of each kind of offer, by path."""
    module = f"rlcore_{package.name}"
    texts = common_texts(package) | {f"{module}/__init__.py": _declarations(package)}
    for kind in package.offers:
        texts[f"{module}/{kind}.py"] = template(f"{kind}.py.txt")
        texts[f"tests/test_{kind}.py"] = template(f"test_{kind}.py.txt")
    return filled_texts(package, texts)


def common_texts(package: PluginPackage) -> dict[str, str]:
    """The files other than modules and tests, by path."""
    import yaml

    rows = [{"prompt": f"Say something, number {number}.", "answer": str(number)} for number in range(16)]
    return {
        **{name: template(f"{name}.txt") for name in ("pyproject.toml", "Makefile", "README.md", "AGENTS.md")},
        ".github/workflows/ci.yml": template("ci.yml.txt"),
        f"rlcore_{package.name}/py.typed": "",
        "try.yaml": yaml.safe_dump(trial_settings(package), sort_keys=False),
        "prompts.jsonl": "".join(json.dumps(row) + "\n" for row in rows),
    }


def filled_texts(package: PluginPackage, texts: Mapping[str, str]) -> dict[str, str]:
    """The texts with the package's names filled in."""
    offers = package.offers.values()
    requires = [RANGE, *dict.fromkeys(offer["requires"] for offer in offers if "requires" in offer)]
    values = {
        "name": package.name,
        "distribution": package.name.replace("_", "-"),
        "summary": ", ".join(offer["summary"] for offer in offers),
        "requires": ", ".join(f'"{requirement}"' for requirement in requires),
        "enable": enabling(package),
    }
    return {name: _filled(text, values) for name, text in texts.items()}


def write_texts(package: PluginPackage, texts: Mapping[str, str]) -> None:
    """Write the files below the package's directory."""
    for name, text in texts.items():
        path = package.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")


def _filled(text: str, values: Mapping[str, str]) -> str:
    for key, value in values.items():
        text = text.replace(f"@{key}@", value)
    return text


def _declarations(package: PluginPackage) -> str:
    """The plugin's module: one hook for all offers of a kind."""
    imports = {"from rlcore.contracts.hooks import hookimpl"}
    for offer in package.offers.values():
        imports |= set(offer.get("imports", ()))
    own = sorted(line for line in imports if "@name@" in line)
    lines = ['"""An rlcore plugin: @summary@."""', "", "from collections.abc import Sequence", ""]
    lines += [*sorted(imports - set(own)), *([""] if own else []), *own]
    return "\n".join([*lines, *declared_hooks(package.offers)]) + "\n"


def declared_hooks(offers: Offers) -> list[str]:
    """The lines of the hooks, each after two empty ones."""
    declared: dict[tuple[str, str, str], list[str]] = {}
    for offer in offers.values():
        if "hook" in offer:
            signature = (offer["hook"], offer.get("parameters", ""), offer["returns"])
            declared.setdefault(signature, []).append(offer["offer"])
        if "worker" in offer:
            declared.setdefault(("rlcore_worker_classes", "", "WorkerClass"), []).append(offer["worker"])
    lines: list[str] = []
    for (hook, parameters, returns), values in declared.items():
        lines += ["", "", "@hookimpl", f"def {hook}({parameters}) -> Sequence[{returns}]:"]
        if len(values) == 1:
            lines.append(f"    return [{values[0]}]")
        else:
            lines += ["    return [", *(f"        {value}," for value in values), "    ]"]
    return lines


def trial_settings(package: PluginPackage) -> dict[str, Any]:
    """The settings of the trial run, by section."""
    own = {key: value for offer in package.offers.values() for key, value in offer["settings"].items()}
    others = [key for key in own if key.startswith("reward.functions.") and not key.startswith(LETTERS)]
    settings = {key: value for key, value in TRY.items() if not (others and key.startswith(LETTERS))} | own
    nested: dict[str, Any] = {}
    for key, value in settings.items():
        *path, last = key.split(".")
        place = nested
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return nested


def try_package(package: PluginPackage) -> float:
    """Run the tests, the check and the training; returns seconds, or raises ConfigError like `run_trial`."""
    with TemporaryDirectory(prefix="rlcore-new-") as site:
        info = Path(site) / f"rlcore_{package.name}-0.1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: rlcore-{package.name}\nVersion: 0.1.0\nRequires-Dist: {RANGE}\n", "utf-8"
        )
        (info / "entry_points.txt").write_text(f"[rlcore]\n{package.name} = rlcore_{package.name}\n", "utf-8")
        paths = [site, str(package.directory.absolute()), *filter(None, [os.environ.get("PYTHONPATH")])]
        commands = [
            ["pytest", "-q", "-p", "no:cacheprovider", "tests"],
            ["rlcore", "plugins", "--check", package.name],
            ["rlcore", "train", "try.yaml", *enabling(package).split(), f"train.dir={site}/run"],
        ]
        directory = str(package.directory)
        environment = TRIAL_ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(paths)}
        return run_trial(directory, directory, commands, environment)


def show_commands(wrote: Path, commands: Sequence[str], num_run: int, took_s: float) -> None:
    """Print the written path and the commands; the first `num_run` of them were run in `took_s` seconds."""
    names = f": {', '.join(sorted(path.name for path in wrote.iterdir()))}" if wrote.is_dir() else ""
    answer(f"wrote {wrote}{names}")
    where = ""
    if wrote.is_dir():
        answer(f"first: cd {wrote} && pip install -e '.[test]'")
        where = " together, with the package on PYTHONPATH instead of installed"
    answer(f"next (run just now, in {took_s:.1f} s{where}):")
    for command in commands[:num_run]:
        answer(f"  {command}")
    for command in commands[num_run:]:
        answer(f"later: {command}")
