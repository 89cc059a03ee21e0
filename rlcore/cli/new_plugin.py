"""`rlcore plugins new NAME`: writes a package that works, with an example and a test of each kind of offer."""

from collections.abc import Sequence
from pathlib import Path

from rlcore.cli.arguments import Parser
from rlcore.cli.console import answer
from rlcore.cli.plugin_file import write_file
from rlcore.cli.plugin_package import (
    Offers,
    PluginPackage,
    check_identifier,
    check_name,
    chosen_offers,
    known_offers,
    new_directory,
    package_texts,
    show_commands,
    try_package,
    write_texts,
)
from rlcore.cli.plugin_update import update_package, write_record
from rlcore.errors import ConfigError


def run(arguments: Sequence[str]) -> int:
    """Write the package, run its three commands, and print them."""
    known = known_offers()
    parser = Parser("plugins new", "Write a plugin that works: an example and a test of each kind of offer.")
    parser.add_argument("name", metavar="NAME", help="the plugin's name; a Python identifier")
    parser.add_argument("--offers", default="reward", metavar="KIND,...", help=f"kinds of offers: {', '.join(known)}")
    parser.add_argument("--into", default=".", metavar="PATH", help="directory to write rlcore-NAME into")
    parser.add_argument("--file", action="store_true", help="write one file, NAME.py, instead of a package")
    parser.add_argument(
        "--update", action="store_true", help="apply the template of this rlcore to an existing package"
    )
    parser.add_argument("--dry-run", action="store_true", help="with --update: print the changes, write nothing")
    parsed = parser.parse(arguments)
    if parsed.update:
        for option in ("--offers", "--file"):
            if any(argument.partition("=")[0] == option for argument in arguments):
                raise ConfigError(f"plugins new: {option} has no effect with --update; the package keeps its offers")
        return _update(parsed.name, Path(parsed.into), known, parsed.dry_run)
    if parsed.dry_run:
        raise ConfigError("plugins new: --dry-run has no effect; needs --update")
    check_name(parsed.name)
    offers = chosen_offers(parsed.offers, known)
    if parsed.file:
        write_file(parsed.name, Path(parsed.into), offers)
        return 0
    package = PluginPackage(parsed.name, new_directory(parsed.name, Path(parsed.into)), offers)
    texts = package_texts(package)
    write_texts(package, texts)
    write_record(package, texts)
    took_s = try_package(package)
    show_commands(package.directory, package.commands, 3, took_s)
    return 0


def _update(name: str, into: Path, known: Offers, dry_run: bool) -> int:
    """Apply the template to an older package, and print the change to each file."""
    from rlcore.plugins.discover import canonical

    name = canonical(name)
    check_identifier(name)
    directory = into / f"rlcore-{name.replace('_', '-')}"
    updates = update_package(name, directory, known, dry_run)
    for update in updates:
        answer(f"{update.name}: {update.action}")
    if dry_run:
        answer("nothing was written: --dry-run")
    return 0
