"""`rlcore plugins show NAME`: the offers of a plugin, its settings with defaults and meanings, and its versions."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields
from typing import Any

from rlcore.cli.arguments import Parser
from rlcore.cli.console import answer, say, stdout, table
from rlcore.cli.plugins import offer_names


def run(arguments: Sequence[str]) -> int:
    """Print tables, or JSON with --json."""
    parser = Parser("plugins show", "Show what a plugin offers, its settings, and the versions of rlcore it is for.")
    parser.add_argument("name", metavar="NAME", help="an installed plugin, or a .py file")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parsed = parser.parse(arguments)
    found = describe_plugin(parsed.name)
    if parsed.json:
        answer(json.dumps(found, indent=1))
        return 0
    console = stdout()
    say(console, f"{found['plugin']}, of {found['distribution']} {found['version']}; rlcore{found['needs'] or ': any'}")
    console.print(table("offers", ("offer",), [(name,) for name in found["offers"]]))
    if found["settings"]:
        rows = [(row["key"], row["default"], row["meaning"]) for row in found["settings"]]
        console.print(table("settings", ("key", "default", "meaning"), rows))
    return 0


def describe_plugin(name: str) -> dict[str, Any]:
    """Name, distribution, version, range of rlcore, offers and settings; PluginError if it cannot be loaded."""
    from rlcore.plugins import load

    hooks = load([name])
    [provider] = hooks.providers()
    types = [offer.value.type for offer in hooks.config_sections() if offer.provider == provider]
    return {
        "plugin": provider.plugin,
        "distribution": provider.distribution,
        "version": provider.version,
        "needs": _range(name),
        "hooks": list(hooks.implemented(provider)),
        "offers": offer_names(hooks, provider),
        "settings": [row for kind in types for row in _settings(kind, f"plugins.{provider.plugin}")],
    }


def _range(name: str) -> str:
    """The versions of rlcore that the plugin's metadata admits; empty for a file and for rlcore's own plugins."""
    from packaging.requirements import Requirement

    from rlcore.plugins.discover import find
    from rlcore.plugins.enabled import is_path

    needed = [] if is_path(name) else [Requirement(line) for line in find(name).requires]
    return next((str(requirement.specifier) for requirement in needed if requirement.name == "rlcore"), "")


def _settings(kind: type[Any], prefix: str) -> Iterator[dict[str, str]]:
    """A row per key: its default as JSON, and its docstring. Sections in sections come with dotted keys."""
    from rlcore.config.key_reference import docs_of
    from rlcore.config.schema import hints_of, section_of

    hints, docs = hints_of(kind), docs_of(kind)
    for spec in fields(kind):
        key, below = f"{prefix}.{spec.name}", section_of(hints[spec.name])
        if below is not None:
            yield from _settings(below, key)
            continue
        made = spec.default_factory() if spec.default_factory is not MISSING else spec.default
        default = "???" if made is MISSING else json.dumps(made, default=str)
        yield {"key": key, "default": default, "meaning": docs.get(spec.name, "")}
