"""Arguments that commands share on the command line: configuration files, overrides and plugins, in any order."""

import argparse
import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from rlcore.cli.console import complain
from rlcore.errors import shown


class Leave(SystemExit):
    """Ends a command on purpose. Any other exit comes from foreign code, which may not end a run."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def __init__(self, command: str, description: str) -> None:
        super().__init__(prog=f"rlcore {command}", description=description, allow_abbrev=False)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        if message:
            complain(message, end="")
        raise Leave(status)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"rlcore: {message}; see '{self.prog} --help'\n")

    def add_settings(self) -> None:
        """Accept files, overrides and --plugin."""
        self.add_argument(
            "settings",
            nargs="*",
            metavar="CONFIG.yaml | key=value",
            help="configuration files, and values that win over them; an argument with '=' is a value",
        )
        self.add_argument(
            "--plugin",
            action="append",
            default=[],
            metavar="NAME",
            help="enable a plugin, by name or as a .py file; same as plugins.NAME={}, which plugins.NAME=false undoes",
        )

    def add_keys_that_matter(self) -> None:
        """Name the keys of a first run, with their defaults, at the end of the help."""
        from rlcore.config.explain import KEYS_THAT_MATTER, summary

        rows = [(key, *summary(key)) for key in KEYS_THAT_MATTER]
        width = max(len(f"{key}={default}") for key, default, _ in rows)
        lines = [f"  {f'{key}={default}':<{width}}  {meaning}" for key, default, meaning in rows]
        self.formatter_class = argparse.RawDescriptionHelpFormatter
        self.epilog = "\n".join(
            ["keys that matter, with their defaults (`rlcore config KEY` explains any of them):", *lines]
        )

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """The parsed arguments; options may stand between positionals."""
        parsed = self.parse_intermixed_args(list(arguments))
        for value in vars(parsed).values():
            for path in value if isinstance(value, list) else (value,):
                if isinstance(path, Path):
                    self._refuse_too_long(path)
        return parsed

    def _refuse_too_long(self, path: Path) -> None:
        try:
            os.lstat(path)
        except OSError as cause:
            if cause.errno == errno.ENAMETOOLONG:
                self.error(f"{shown(str(path))} is too long for a path; needs names of at most 255 bytes")


@dataclass(frozen=True)
class Settings:
    """The sources of a command's configuration."""

    files: tuple[Path, ...]
    overrides: tuple[str, ...]
    plugins: tuple[str, ...]


def settings_of(parsed: argparse.Namespace) -> Settings:
    """Files, overrides and plugins, each in the order given; a positional with '=' is an override."""
    positionals: list[str] = parsed.settings
    return Settings(
        files=tuple(Path(positional) for positional in positionals if "=" not in positional),
        overrides=tuple(positional for positional in positionals if "=" in positional),
        plugins=tuple(parsed.plugin),
    )
