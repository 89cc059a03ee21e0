"""`rlcore view`: runs the command of rlcore-view, a distribution that needs neither torch nor rlcore."""

from collections.abc import Sequence

from rlcore_view.cli import main

from rlcore.cli.arguments import Leave


def run(arguments: Sequence[str]) -> int:
    """Pass everything on to rlcore-view."""
    try:
        return int(main(arguments, prog="rlcore view"))
    except SystemExit as answered:  # its help, or an error in the arguments
        raise Leave(answered.code) from None
