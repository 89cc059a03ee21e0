"""`rlcore plugins search WORD`: prints plugins of the catalogue, with the results of their tests."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from rlcore.cli.arguments import Parser
from rlcore.cli.console import answer, say, stdout, table


def run(arguments: Sequence[str]) -> int:
    """Print the plugins that match as a table, or as JSON with --json."""
    from rlcore.plugins.catalogue import read_catalogue, search

    parser = Parser("plugins search", "Search the catalogue of plugins, a file that comes with rlcore: no network.")
    parser.add_argument("words", nargs="*", metavar="WORD", help="parts of names, offers or summaries; none: all")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parsed = parser.parse(arguments)
    everything = read_catalogue()
    found = search(everything, parsed.words)
    if parsed.json:
        answer(json.dumps([asdict(entry) for entry in found], indent=1))
        return 0
    console = stdout()
    if not found:
        names = ", ".join(entry.plugin for entry in everything)
        say(console, f"no plugin of the catalogue has '{' '.join(parsed.words)}'; it has: {names}")
        return 0
    rows = [
        (
            entry.plugin,
            entry.summary,
            ", ".join(entry.offers),
            "; ".join(f"rlcore {version}: {result.words}" for version, result in entry.results.items()) or "not run",
            entry.install,
        )
        for entry in found
    ]
    console.print(table("plugins", ("plugin", "summary", "offers", "tests", "install"), rows))
    return 0
