"""`rlcore plugins`: lists installed and enabled plugins with their offers and problems."""

import faulthandler
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rlcore.cli.arguments import Parser, Settings, settings_of
from rlcore.cli.console import answer
from rlcore.cli.endings import refuse_early_ends
from rlcore.cluster.interpreter import run_in_new_interpreter
from rlcore.errors import counted

if TYPE_CHECKING:
    from rlcore.config.providers import Provider
    from rlcore.plugins import Hooks

SUBCOMMANDS = {
    "new": "rlcore.cli.new_plugin",
    "package": "rlcore.cli.plugin_file",
    "search": "rlcore.cli.plugin_search",
    "show": "rlcore.cli.plugin_show",
}
_START_S = 30.0
"""Seconds for starting a process and importing rlcore in it."""
_FRAME = re.compile(r'File "(.+)", line (\d+) in (.+)')


@dataclass(frozen=True)
class PluginRow:
    """One plugin, installed or in a file."""

    name: str
    distribution: str
    version: str
    enabled: bool
    source: str
    """The argument that loads it: its name, or the path of its file."""
    hooks: tuple[str, ...] | None = None
    """The hooks that it implements; None if it was not loaded, because it is neither enabled nor checked."""
    offers: tuple[str, ...] | None = None
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def run(arguments: Sequence[str]) -> int:
    """List the plugins; 2 if --check found a problem."""
    if arguments and arguments[0] in SUBCOMMANDS:
        return import_module(SUBCOMMANDS[arguments[0]]).run(arguments[1:])  # type: ignore[no-any-return]
    parser = Parser(
        "plugins",
        "List plugins. A plugin that neither the configuration nor --plugin enables is not imported. "
        "`rlcore plugins show NAME` describes one, `rlcore plugins search WORD` finds one, "
        "`rlcore plugins new NAME` writes one.",
    )
    parser.add_settings()
    parser.add_argument(
        "--check",
        nargs="*",
        metavar="NAME",
        help="load the named plugins (or .py files), or all, each in a separate process, and report problems",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parsed = parser.parse(arguments)
    named = parsed.check or []
    parsed.settings += [word for word in named if _is_setting(word)]
    rows = _rows(settings_of(parsed))
    if parsed.check is None:
        rows = _loaded(rows)
    else:
        names = [word for word in named if not _is_setting(word)]
        rows = [_checked(row) for row in (_selected(rows, names) if names else rows)]
    if parsed.json:
        answer(json.dumps([asdict(row) for row in rows], indent=1))
    else:
        _show(rows, parsed.check is not None)
    return 2 if any(row.problems for row in rows) else 0


def _rows(settings: Settings) -> list[PluginRow]:
    """Every installed plugin, and the enabled plugins in plain files."""
    from rlcore.config import enabled_plugins
    from rlcore.plugins import installed
    from rlcore.plugins.enabled import is_path, name_of

    sections = enabled_plugins(settings.files, settings.overrides)
    sources = {name: _source(name, section) for name, section in sections.items()}
    sources |= {name_of(plugin): plugin for plugin in settings.plugins}
    found = installed()
    rows = [
        PluginRow(offer.name, offer.provider.distribution, offer.provider.version, offer.name in sources, offer.name)
        for offer in found
        if not is_path(sources.get(offer.name, ""))
    ]
    known = {row.name for row in rows}
    return rows + [PluginRow(name, source, "-", True, source) for name, source in sources.items() if name not in known]


def _is_setting(argument: str) -> bool:
    """True for a configuration file or a value among the names after --check."""
    return "=" in argument or argument.endswith((".yaml", ".yml"))


def _selected(rows: Sequence[PluginRow], names: Sequence[str]) -> list[PluginRow]:
    """The rows of the plugins that --check names; PluginError for a plugin that is not installed."""
    from rlcore.plugins.discover import find
    from rlcore.plugins.enabled import is_path, name_of

    selected: dict[PluginRow, None] = {}
    for name in names:
        found = [row for row in rows if row.name == name_of(name) and not is_path(name)]
        if not found and not is_path(name):
            find(name)
        selected |= dict.fromkeys(found or [PluginRow(name_of(name), name, "-", False, name)])
    return list(selected)


def _source(name: str, section: Mapping[str, Any]) -> str:
    path = section.get("path")
    return path if isinstance(path, str) and path.endswith(".py") else name


def _loaded(rows: Sequence[PluginRow]) -> list[PluginRow]:
    """The rows with the hooks and offers of the enabled plugins."""
    from rlcore.plugins import load

    hooks = load([row.source for row in rows if row.enabled])
    providers = {provider.plugin: provider for provider in hooks.providers()}
    return [_described(row, hooks, providers[row.name]) if row.name in providers else row for row in rows]


def _described(row: PluginRow, hooks: "Hooks", provider: "Provider") -> PluginRow:
    return replace(row, hooks=hooks.implemented(provider), offers=tuple(offer_names(hooks, provider)))


def offer_names(hooks: "Hooks", provider: "Provider") -> list[str]:
    """A plugin's offers, each as 'kind name'."""
    kinds: tuple[tuple[str, Sequence[Any]], ...] = (
        ("section", hooks.config_sections()),
        ("reward function", hooks.reward_functions()),
        ("reward function", [replace(offer, provider=provider) for offer in hooks.rewards_of(provider)]),
        ("reward manager", hooks.reward_managers()),
        ("critic engine", hooks.critic_engines()),
        ("agent loop", hooks.agent_loops()),
    )
    names = [f"{kind} {offer.value.name}" for kind, offers in kinds for offer in offers if offer.provider == provider]
    for algorithm in hooks.algorithms():
        if algorithm.provider == provider:
            names.append(f"{algorithm.value.kind.replace('_', ' ')} {algorithm.value.name}")
    names += [f"cluster {offer.value.name}" for offer in hooks.clusters() if offer.provider == provider]
    names += [f"tracker {offer.value.name}" for offer in hooks.trackers() if offer.provider == provider]
    names += [f"prompt order {offer.value.name}" for offer in hooks.prompt_orders() if offer.provider == provider]
    for worker in hooks.worker_classes():
        if worker.provider == provider:
            names.append(f"{worker.value.interface.__name__} for backend {worker.value.backend}")
    return names


def _checked(row: PluginRow) -> PluginRow:
    """The row with the problems that a new process finds in the plugin."""
    with TemporaryDirectory(prefix="rlcore-check-") as directory:
        found_at = Path(directory) / "found.json"  # a plugin may write to stdout at any time
        statement = f"report({row.source!r}, {str(found_at)!r})"
        code = f"import sys; sys.path[:] = {sys.path!r}; from rlcore.cli.plugins import report; {statement}"
        done = run_in_new_interpreter(code, _hard_limit_s() + _START_S)
        text = found_at.read_text("utf-8") if found_at.exists() else ""
    if done is None:
        return replace(
            row, problems=(f"plugin '{row.name}': checking it took more than {_hard_limit_s() + _START_S:g} s",)
        )
    frames = _FRAME.findall(done.errors.partition("Timeout (")[2].rpartition("Thread ")[2])
    if frames:
        where = "in {2} at {0}:{1}".format(*frames[0])
        problem = f"plugin '{row.name}': its check was not done after {_hard_limit_s():g} s, {where}"
        return replace(row, problems=(problem,))
    if done.code != 0 or not text:
        last = (done.errors.strip().splitlines() or ["it said nothing"])[-1]
        return replace(row, problems=(f"plugin '{row.name}': checking it ended with {done.code}: {last}",))
    found = json.loads(text)
    return replace(
        row,
        hooks=None if found["hooks"] is None else tuple(found["hooks"]),
        offers=None if found["offers"] is None else tuple(found["offers"]),
        problems=tuple(found["problems"]),
        warnings=tuple(found["warnings"]),
    )


def _hard_limit_s() -> float:
    """Seconds after which a check that ignores interruptions is killed; no other part of a check takes as long."""
    from rlcore.plan.time_limit import limit_s

    return 2 * limit_s() + 1


def report(source: str, found_at: str) -> None:
    """Write the problems of a plugin into a JSON file. Runs in a new process, so that its imports can be seen."""
    from rlcore.testing.conformance import checked_hooks

    refuse_early_ends()
    faulthandler.dump_traceback_later(_hard_limit_s(), exit=True)
    with redirect_stdout(sys.stderr):
        checked, hooks = checked_hooks(source)
        found: dict[str, Any] = {"problems": checked.problems, "warnings": checked.warnings}
        found |= {"hooks": None, "offers": None}
        if hooks is not None:
            (provider,) = hooks.providers()
            found |= {"hooks": hooks.implemented(provider), "offers": offer_names(hooks, provider)}
    Path(found_at).write_text(json.dumps(found), "utf-8")
    os._exit(0)  # a thread of the plugin may never end


def _show(rows: Sequence[PluginRow], checked: bool) -> None:
    from rlcore.cli.console import say, stdout, table

    console = stdout()
    lines = [
        (
            row.name,
            row.distribution,
            row.version,
            "yes" if row.enabled else "no",
            _words([hook.removeprefix("rlcore_") for hook in row.hooks] if row.hooks is not None else None),
            _words(row.offers),
        )
        for row in rows
    ]
    console.print(table("plugins", ("plugin", "distribution", "version", "enabled", "hooks", "offers"), lines))
    for row in rows:
        for text in row.warnings:
            say(console, f"warning: {text}")
        for text in row.problems:
            say(console, f"problem: {text}")
    if checked and not any(row.problems for row in rows):
        say(console, f"{counted(len(rows), 'plugin')} checked, no problem found")


def _words(values: Sequence[str] | None) -> str:
    return "not loaded" if values is None else ", ".join(values) or "-"
