"""`rlcore view`: the command of rlcore-view, a distribution that needs neither torch nor rlcore."""

from collections.abc import Sequence

from rlcore.cli.arguments import Leave
from rlcore.errors import ConfigError


def run(arguments: Sequence[str]) -> int:
    """Pass everything on to rlcore-view."""
    try:
        from rlcore_view.cli import main
    except ImportError as error:
        raise ConfigError("view: needs the package rlcore-view; pip install 'rlcore[view]'") from error
    try:
        return int(main(arguments, prog="rlcore view"))
    except SystemExit as answered:  # its help, or what is wrong with the arguments
        raise Leave(answered.code) from None
