"""Runs commands in the package or file that `rlcore plugins` wrote."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from time import monotonic

from rlcore.cluster.forks import ForkedCommands, run_in_forks
from rlcore.errors import ConfigError

CHECK_S = 180.0
"""Seconds that each command may take."""
SHARED_IMPORTS = ("torch", "omegaconf", "rlcore.plugins", "rlcore.train")
"""Modules that are imported once for all commands; none of them loads a plugin."""


def run_trial(wrote: str, where: str, commands: Sequence[Sequence[str]], environment: Mapping[str, str]) -> float:
    """Run the commands, each a module and its arguments; returns the seconds they took.

    ConfigError naming `wrote`, the file or directory, with the last line of the command that fails.
    """
    began = monotonic()
    who = f"plugins: wrote '{wrote}', where "
    for command in commands:
        if command[0] == "pytest" and find_spec("pytest") is None:
            raise ConfigError(f"{who}{_named(command)} was not run: pytest is not installed; pip install pytest")
    endings = run_in_forks(ForkedCommands(commands, where, environment, SHARED_IMPORTS, CHECK_S))
    if isinstance(endings, str):
        raise ConfigError(f"{who}no command was run: {endings}")
    for command, ended in zip(commands, endings, strict=False):
        if ended.code is None:
            raise ConfigError(f"{who}{_named(command)} was not done after {CHECK_S:g} s")
        if ended.code:
            raise ConfigError(f"{who}{_named(command)} ended with {ended.code}: {ended.last_line}")
    return monotonic() - began


def _named(command: Sequence[str]) -> str:
    return f"'{' '.join(command[:3])}'"
