"""`rlcore config`: every value with its origin, or the annotated reference."""

import json
from collections.abc import Sequence

from rlcore.cli.arguments import Parser, settings_of
from rlcore.cli.console import answer


def run(arguments: Sequence[str]) -> int:
    """Print the configuration that a run would have; checks it as `train` does, but plans nothing."""
    parser = Parser("config", "Print every value of a configuration with its origin, one a line.")
    parser.add_settings()
    parser.add_argument("--reference", action="store_true", help="print every key with default and docs, as YAML")
    parsed = parser.parse(arguments)
    if parsed.reference:
        from rlcore.config.key_reference import render

        answer(render().rstrip("\n"))
        return 0
    settings = settings_of(parsed)

    from rlcore.plugins import configure

    _, loaded = configure(settings.files, settings.overrides, settings.plugins)
    for key, value in loaded.values.items():
        answer(f"{key}={json.dumps(value)}  # {loaded.origins[key]}")
    return 0
