"""Runs commands one after another as forks of one new interpreter, which imports shared modules once."""

import json
import os
import runpy
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from select import select
from signal import SIGKILL
from tempfile import TemporaryFile
from typing import IO, NoReturn

from rlcore.cluster.interpreter import InterpreterResult, run_in_new_interpreter

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""A library that starts threads when it is imported cannot be forked safely."""


@dataclass(frozen=True)
class ForkedCommands:
    """Commands to run until one fails."""

    commands: Sequence[Sequence[str]]
    """Each a module and its arguments, as in `python -m`."""
    where: str
    """The working directory."""
    environment: Mapping[str, str]
    shared_imports: Sequence[str]
    """Modules that are imported before the first fork."""
    limit_s: float
    """Seconds that each command may take."""


@dataclass(frozen=True)
class CommandEnd:
    """The ending of a command."""

    code: int | None
    """None: it was stopped after `limit_s`."""
    last_line: str
    """The last line that it wrote, or the last failure that pytest names."""


def run_in_forks(commands: ForkedCommands) -> Sequence[CommandEnd] | str:
    """The results of the commands that were run; an error text if the interpreter itself failed."""
    code = (
        f"import json, os; os.environ |= {dict(commands.environment) | ONE_THREAD!r}\n"
        f"from rlcore.cluster.forks import ForkedCommands, run_forks; run_forks(ForkedCommands(**{asdict(commands)!r}))"
    )
    done: InterpreterResult | None = run_in_new_interpreter(code, commands.limit_s * (len(commands.commands) + 1))
    if done is None:
        return "the interpreter did not end"
    if done.code:
        return (done.errors.strip().splitlines() or ["the interpreter ended without a word"])[-1]
    return [CommandEnd(**fields) for fields in json.loads(done.output.splitlines()[-1])]


def run_forks(commands: ForkedCommands) -> None:
    """Import the shared modules, fork each command, and print the results as one line of JSON."""
    os.chdir(commands.where)
    sys.dont_write_bytecode = "PYTHONDONTWRITEBYTECODE" in commands.environment
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    for module in commands.shared_imports:
        import_module(module)
    endings: list[CommandEnd] = []
    for command in commands.commands:
        endings.append(_forked(command, commands.limit_s))
        if endings[-1].code != 0:
            break
    sys.stdout.write(json.dumps([asdict(ended) for ended in endings]) + "\n")


def _forked(command: Sequence[str], limit_s: float) -> CommandEnd:
    with TemporaryFile() as output, TemporaryFile() as errors:
        pid = os.fork()
        if not pid:
            _be(command, output.fileno(), errors.fileno())
        code = _code_of(pid, limit_s)
        text = _text(errors) or _text(output)
    lines = text.splitlines() or ["it wrote nothing"]
    named = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return CommandEnd(code, (named or lines)[-1])


def _be(command: Sequence[str], output: int, errors: int) -> NoReturn:
    """Run the command in this fork and exit like it, but skip the interpreter's exit handlers."""
    code = 1
    os.dup2(output, 1)
    os.dup2(errors, 2)
    sys.argv = list(command)
    try:
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    finally:
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _code_of(pid: int, limit_s: float) -> int | None:
    """The exit code of the fork; None if it had to be stopped."""
    handle = os.pidfd_open(pid)
    try:
        ended, _, _ = select([handle], [], [], limit_s)
        if not ended:
            os.kill(pid, SIGKILL)
        _, status = os.waitpid(pid, 0)
    finally:
        os.close(handle)
    return os.waitstatus_to_exitcode(status) if ended else None


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode("utf-8", "replace").strip()
