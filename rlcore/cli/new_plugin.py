"""`rlcore plugins new NAME`: a package that works, with an example and a test of each kind of offer."""

from collections.abc import Sequence
from pathlib import Path

from rlcore.cli.arguments import Parser
from rlcore.cli.plugin_file import write_file
from rlcore.cli.plugin_package import (
    PluginPackage,
    check_name,
    chosen_offers,
    known_offers,
    new_directory,
    show_commands,
    try_package,
    write_package,
)


def run(arguments: Sequence[str]) -> int:
    """Write the package, run its three commands, and print them."""
    known = known_offers()
    parser = Parser("plugins new", "Write a plugin that works: an example and a test of each kind of offer.")
    parser.add_argument("name", metavar="NAME", help="the plugin's name; a Python identifier")
    parser.add_argument("--offers", default="reward", metavar="KIND,...", help=f"of: {', '.join(known)}")
    parser.add_argument("--into", default=".", metavar="PATH", help="directory to write rlcore-NAME into")
    parser.add_argument("--file", action="store_true", help="write one file, NAME.py, instead of a package")
    parsed = parser.parse(arguments)
    check_name(parsed.name)
    offers = chosen_offers(parsed.offers, known)
    if parsed.file:
        write_file(parsed.name, Path(parsed.into), offers)
        return 0
    package = PluginPackage(parsed.name, new_directory(parsed.name, Path(parsed.into)), offers)
    write_package(package)
    try_package(package)
    show_commands(package.directory, package.commands, 3)
    return 0
