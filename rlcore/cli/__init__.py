"""The command line: `rlcore COMMAND ...`, one module for each command, imported when it is called.

This module imports nothing heavy, so that `rlcore --help` is immediate. Exit codes:

* 2, with one line on stderr, for an RlcoreError and for a lack of memory or permission;
* 130 for Ctrl-C;
* 1 for a bug, with its traceback, and for `sys.exit()` in called code, with one line.

The boundary around called code refuses `os._exit()` and `os.execv()` like `sys.exit()` (`endings`).
"""

import errno
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module

from rlcore import __version__
from rlcore.cli.console import (
    answer,
    complain,
    drop_impossible_sizes,
    escape_unknown_characters,
    open_closed_streams,
)
from rlcore.cli.endings import refuse_early_ends
from rlcore.cli.inherited_signals import reset_inherited_signals
from rlcore.errors import ConfigError, RlcoreError, boundary, describe, nearest

COMMANDS = {
    "init": "write a project: data, a reward with its test, a configuration",
    "train": "train with a configuration, or continue a run",
    "plan": "show what a run would consist of; starts nothing",
    "config": "show every value of a configuration with its origin, or explain a key",
    "resume": "continue a run with its own configuration",
    "eval": "evaluate a model or a checkpoint on held-out prompts",
    "chat": "talk to the weights of a run",
    "sweep": "train over seeds and values of keys, some runs at a time, and compare",
    "export": "write a checkpoint as a model directory for others",
    "where": "show what runs do at the moment, and what their samples wait for",
    "view": "show a run as one HTML file, find samples in it, explain why nothing is learned",
    "runs": "list runs: state, step, last metrics, disk",
    "plugins": "list what is installed and what it offers, or check it",
}
"""Summary by command; the command is `run(arguments) -> exit code` of `rlcore.cli.<name>`, or of the name in MODULES.
"""
MODULES = {"runs": "run_list"}

ERROR, INTERRUPTED, BUG = 2, 130, 1


class _Bug(RlcoreError):
    """rlcore, or a library that it calls, raised an unexpected exception."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return the exit code.

    Without `arguments` it runs the process's own command; code that the command calls cannot end the process with 0.
    """
    if arguments is not None:
        return _answered(arguments)
    reset_inherited_signals()
    open_closed_streams()
    escape_unknown_characters()
    drop_impossible_sizes()
    endings = refuse_early_ends()
    endings.code = _answered(sys.argv[1:])
    return endings.code


def _answered(arguments: Sequence[str]) -> int:
    """Run a command; the exit code, also for an exception, which is reported on stderr."""
    try:
        with boundary("rlcore", _Bug, Exception):
            return _run(list(arguments))
    except _Bug as bug:
        return _explained(bug.__cause__)
    except RlcoreError as error:
        complain(_one_line(error))
        return ERROR
    except SystemExit as leaving:
        from rlcore.cli.arguments import Leave

        if isinstance(leaving, Leave):
            raise
        complain(f"rlcore: the run ended before its time, in code that it calls: {describe(leaving)}")
        return BUG
    except KeyboardInterrupt:
        complain("rlcore: interrupted")
        return INTERRUPTED


def _explained(bug: BaseException | None) -> int:
    """The exit code of a bug, whose traceback is shown, or of a lack of memory or permission, which is one line."""
    if isinstance(bug, PermissionError):
        complain(f"rlcore: {describe(bug)}; needs a user with access, or other permissions")
        return ERROR
    if isinstance(bug, OSError) and bug.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        complain(f"rlcore: {describe(bug)}; needs room for what is written, output included")
        return ERROR
    try:
        from rlcore.cli.lack_of_memory import lack_of_memory

        if problem := lack_of_memory(bug):
            complain(f"rlcore: {problem}")
            return ERROR
        # Through `complain`: a traceback must not show the secrets of a configuration.
        complain("".join(traceback.format_exception(bug)).rstrip())
        return BUG
    except MemoryError:  # also while it is put into words
        os.write(2, b"rlcore: not enough memory\n")
        return ERROR


def _run(arguments: list[str]) -> int:
    try:
        code = _command(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader of the output is gone (`rlcore plan | head`); without this, Python reports an error at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _command(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        answer(_help())
        return 0
    name, *rest = arguments
    if name in ("-V", "--version"):
        answer(f"rlcore {__version__}")
        return 0
    if name not in COMMANDS:
        raise ConfigError(f"found no command '{name}'; {nearest(name, tuple(COMMANDS))}")
    try:
        os.getcwd()
    except OSError as cause:
        raise ConfigError(f"the working directory is gone ({describe(cause)}); needs one; change to another") from cause
    code: int = import_module(f"rlcore.cli.{MODULES.get(name, name)}").run(rest)
    return code


def _help() -> str:
    commands = "\n".join(f"  {name:<8} {summary}" for name, summary in COMMANDS.items())
    return (
        "usage: rlcore COMMAND ...   (rlcore COMMAND --help says more)\n\n"
        f"Reinforcement learning post-training of language models.\n\n{commands}\n\n"
        "options:\n  -h, --help     show this\n  -V, --version  show the version"
    )


def _one_line(error: RlcoreError) -> str:
    return f"rlcore: {' '.join(str(error).split())}"
