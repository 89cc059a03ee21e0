"""Makes the catalogue of plugins and its page: `python docs/catalogue.py [--run NAME ...]`.

The entries are those of the distributions in this repository: names and versions of their metadata, offers as
`rlcore plugins show` finds them. `--run` runs the tests of the named plugins that are suites of `rlcore.testing`, and
`rlcore plugins --check`, and keeps the results under this version of rlcore; the results of others stay.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from rlcore import __version__
from rlcore.cli.plugin_show import describe_plugin
from rlcore.plugins.catalogue import CatalogueEntry, read_catalogue
from rlcore.plugins.discover import installed
from rlcore.testing.packages import write_metadata

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "rlcore" / "plugins" / "catalogue.json"
PAGE = ROOT / "docs" / "catalogue.md"
PLACES = ("plugins/*/pyproject.toml", "examples/*/plugin/pyproject.toml", "examples/plugins/*/pyproject.toml")
WITH_EXTRA = {"vllm": "engine"}
"""Plugins whose library is in an extra."""


def distributions() -> dict[str, Path]:
    """The directory of every plugin of the repository, by the plugin's name."""
    found = {}
    for path in sorted(path for place in PLACES for path in ROOT.glob(place)):
        for name in tomllib.loads(path.read_text("utf-8"))["project"].get("entry-points", {}).get("rlcore", {}):
            found[name] = path.parent
    return found


def described(name: str, directory: Path, results: dict[str, Any]) -> dict[str, Any]:
    """The entry of a plugin that is installed."""
    project = tomllib.loads((directory / "pyproject.toml").read_text("utf-8"))["project"]
    shown, source = describe_plugin(name), directory.relative_to(ROOT).as_posix()
    path = f"'./{source}[{WITH_EXTRA[name]}]'" if name in WITH_EXTRA else f"./{source}"
    return {
        "plugin": name,
        "distribution": project["name"],
        "summary": project["description"],
        "source": source,
        "install": f"pip install {path}",
        "needs": shown["needs"],
        "offers": shown["offers"],
        "results": results,
    }


def tested(name: str, directory: Path) -> dict[str, Any]:
    """The results of the plugin's suites and of the check, each in a separate process."""
    suites = [str(path) for path in sorted((directory / "tests").glob("test_*.py")) if "Suite" in path.read_text()]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not gpu", *suites]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|error|skipped)", printed)}
    command = [sys.executable, "-m", "rlcore", "plugins", "--check", name, "--json"]
    [row] = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout)
    return {
        "passed": counts.get("passed", 0),
        "failed": counts.get("failed", 0) + counts.get("error", 0),
        "skipped": counts.get("skipped", 0),
        "problems": row["problems"],
        "python": platform.python_version(),
    }


def page(entries: tuple[CatalogueEntry, ...]) -> str:
    """The page of the site."""
    lines = [
        "# Catalogue of plugins",
        "",
        "For users who look for a plugin. `rlcore plugins search WORD` searches the same list. The tests are the",
        "plugin's conformance [suites](testing-a-plugin.md), run with the version of rlcore next to them.",
        "The packages are not on PyPI yet: [install](how-to.md#install-it-in-your-environment) them from a clone.",
        "This page is made by `python docs/catalogue.py`.",
        "",
        "| plugin | | offers | needs rlcore | tests |",
        "|---|---|---|---|---|",
    ]
    for entry in entries:
        results = "<br>".join(f"{version}: {result.words}" for version, result in entry.results.items()) or "not run"
        where = entry.source if ":" in entry.source else f"../{entry.source}"
        lines.append(
            f"| [{entry.plugin}]({where}), `{entry.install}` | {entry.summary} | {'<br>'.join(entry.offers)} | "
            f"{entry.needs} | {results} |"
        )
    return "\n".join([*lines, "", ADD]) + "\n"


ADD = """A plugin comes into the catalogue by a pull request that adds its entry to `rlcore/plugins/catalogue.json`,
with the results of its suites."""


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", nargs="*", default=[], metavar="NAME", help="plugins whose suites are run now")
    names, places = parser.parse_args().run, distributions()
    with tempfile.TemporaryDirectory() as site:
        _find(places, Path(site))
        _write(names, places)


def _find(places: dict[str, Path], site: Path) -> None:
    """Let this process and those that it starts find the plugins that are not installed."""
    here = {plugin.name for plugin in installed()}
    added = [str(site)]
    for directory in {directory for name, directory in places.items() if name not in here}:
        write_metadata(site, directory)
        added.append(str(directory))
    sys.path += added
    os.environ["PYTHONPATH"] = os.pathsep.join(added)


def _write(names: list[str], places: dict[str, Path]) -> None:
    before = (
        {entry["plugin"]: entry for entry in json.loads(DATA.read_text("utf-8"))["plugins"]} if DATA.exists() else {}
    )
    ours = []
    for name, directory in places.items():
        results = dict(before.get(name, {}).get("results", {}))
        if name in names:
            results[__version__] = tested(name, directory)
        ours.append(described(name, directory, results))
    others = [entry for name, entry in before.items() if name not in places]
    entries = sorted([*ours, *others], key=lambda entry: str(entry["plugin"]))
    DATA.write_text(json.dumps({"plugins": entries}, indent=1) + "\n", "utf-8")
    PAGE.write_text(page(read_catalogue()), "utf-8")


if __name__ == "__main__":
    main()
