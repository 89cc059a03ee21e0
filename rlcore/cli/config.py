"""`rlcore config`: every value with its origin, one key explained, or the annotated reference."""

import json
from collections.abc import Sequence
from typing import Any

from rlcore.cli.arguments import Parser, Settings, settings_of
from rlcore.cli.console import answer


def run(arguments: Sequence[str]) -> int:
    """Print the configuration of a run; checks it like `train`, but plans nothing."""
    parser = Parser("config", "Print every value of a configuration with its origin, or explain named keys.")
    parser.add_settings()
    parser.add_argument("--reference", action="store_true", help="print every key with default and docs, as YAML")
    parsed = parser.parse(arguments)
    if parsed.reference:
        from rlcore.config.key_reference import render

        answer(render().rstrip("\n"))
        return 0
    keys = [word for word in parsed.settings if _is_key(word)]
    parsed.settings = [word for word in parsed.settings if word not in keys]
    settings = settings_of(parsed)
    if keys:
        return _explain(keys, settings)

    from rlcore.plugins import configure

    _, loaded = configure(settings.files, settings.overrides, settings.plugins)
    for key, value in loaded.values.items():
        answer(f"{key}={json.dumps(value)}  # {loaded.origins[key]}")
    return 0


def _is_key(word: str) -> bool:
    """True for the name of a key or section; anything else without '=' is a file."""
    return "=" not in word and "/" not in word and not word.endswith((".yaml", ".yml"))


def _explain(keys: Sequence[str], settings: Settings) -> int:
    """Print the meaning of the keys; with files or values also the origin of each key's value."""
    from rlcore.config.explain import explain
    from rlcore.plugins import configure, load

    origins: dict[str, str] = {}
    if settings.files or settings.overrides:
        hooks, loaded = configure(settings.files, settings.overrides, settings.plugins)
        origins = {key: f"{loaded.origins[key]}, to {json.dumps(value)}" for key, value in loaded.values.items()}
    else:
        hooks = load(settings.plugins)
    types: dict[str, type[Any]] = {offer.value.name: offer.value.type for offer in hooks.config_sections()}
    for number, key in enumerate(keys):
        answer("\n".join([*([""] if number else []), *explain(key, types, origins)]))
    return 0
