"""`rlcore plugins show NAME`: prints a plugin's offers, its settings with defaults and meanings, and its versions."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from rlcore.cli.arguments import Parser
from rlcore.cli.console import answer, say, stdout, table
from rlcore.cli.plugins import offer_names
from rlcore.errors import ConfigError


def run(arguments: Sequence[str]) -> int:
    """Print tables, or JSON with --json; with --readme write a section of that file instead of printing."""
    parser = Parser("plugins show", "Show what a plugin offers, its settings, and the versions of rlcore it is for.")
    parser.add_argument("name", metavar="NAME", help="an installed plugin, or a .py file")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--readme", metavar="FILE", help="write offers and settings as a section of this file")
    parsed = parser.parse(arguments)
    found = describe_plugin(parsed.name)
    if parsed.readme:
        _write_section(Path(parsed.readme), found)
        answer(f"wrote the section of {found['plugin']} in {parsed.readme}")
        return 0
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


def readme_section(found: Mapping[str, Any]) -> str:
    """The result of `describe_plugin` as Markdown, between two comments that mark it for the next update."""
    name = found["plugin"]
    lines = [f"<!-- rlcore plugins show {name} -->", "## Offers and settings", ""]
    lines += [f"- {offer}" for offer in found["offers"]]
    if found["settings"]:
        lines += ["", "| setting | default | |", "|---|---|---|"]
        lines += [
            f"| `{row['key']}` | {_cell(row['default'])} | {_prose(row['meaning'])} |" for row in found["settings"]
        ]
    lines += [
        "",
        f"Needs rlcore{found['needs']}." if found["needs"] else "",
        f"<!-- end of rlcore plugins show {name} -->",
    ]
    return "\n".join(lines).replace("\n\n\n", "\n\n") + "\n"


def with_section(text: str, found: Mapping[str, Any]) -> str:
    """The text of a README with the section, in the place of an older one or at the end."""
    section, name = readme_section(found), found["plugin"]
    before, start, rest = text.partition(f"<!-- rlcore plugins show {name} -->\n")
    _, end, after = rest.partition(f"<!-- end of rlcore plugins show {name} -->\n")
    if start and not end:
        raise ConfigError(f"the section of {name} has a beginning and no end; remove its first line, and try again")
    return before + section + after if start else f"{text.rstrip()}\n\n{section}"


def _write_section(file: Path, found: Mapping[str, Any]) -> None:
    if not file.is_file():
        raise ConfigError(f"plugins show: '{file}' is not a file to write a section of; make it first")
    file.write_text(with_section(file.read_text("utf-8"), found), "utf-8")


def _prose(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def _cell(default: str) -> str:
    """A default as code on one line; cuts long texts."""
    text = default if len(default) <= 40 else default[:37] + "..."
    return f"`{text}`".replace("|", "\\|")


def _range(name: str) -> str:
    """The versions of rlcore that the plugin's metadata admits; empty for a file and for rlcore's own plugins."""
    from packaging.requirements import Requirement

    from rlcore.plugins.discover import find
    from rlcore.plugins.enabled import is_path

    needed = [] if is_path(name) else [Requirement(line) for line in find(name).requires]
    return next((str(requirement.specifier) for requirement in needed if requirement.name == "rlcore"), "")


def _settings(kind: type[Any], prefix: str) -> Iterator[dict[str, str]]:
    """A row per key: its default as JSON, and its docstring.

    Keys of inner sections are dotted; NAME stands for the key of an entry.
    """
    from rlcore.config.key_reference import docs_of
    from rlcore.config.schema import entries_of, hints_of, section_of

    hints, docs = hints_of(kind), docs_of(kind)
    for spec in fields(kind):
        key, below = f"{prefix}.{spec.name}", section_of(hints[spec.name])
        if below is not None:
            yield from _settings(below, key)
            continue
        entries = section_of(entries_of(hints[spec.name]))
        made = spec.default_factory() if spec.default_factory is not MISSING else spec.default
        default = "???" if made is MISSING else json.dumps(made, default=str)
        yield {"key": key, "default": default, "meaning": docs.get(spec.name, "")}
        if entries is not None:
            yield from _settings(entries, f"{key}.NAME")
