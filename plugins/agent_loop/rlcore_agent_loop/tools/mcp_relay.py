"""Runs a tool server and passes its standard output on, up to a line that is too long: `python mcp_relay.py COMMAND`.

The package mcp reads a line into memory however long it is. This process stands between the two: at a line of more than
MAX_LINE bytes it ends the server and itself, which the package sees as the end of the server. It ends a server that
outlives the run, too. Standard input and error are the server's own. It is run as a file, without the site's packages,
so it imports the standard library only.
"""

import os
import select
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

MAX_LINE = 4 << 20
CHUNK = 1 << 16
GRACE_S = 2.0
"""Seconds for a server to end by itself after the run has."""


def main(command: Sequence[str]) -> int:
    """Run the server; its exit code, 1 after a line that is too long."""
    reading, writing = os.pipe()
    run = os.pidfd_open(os.getppid())
    server = os.fork()
    if server == 0:
        _become(command, writing)
    os.close(writing)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)  # only the server reads it, so that its end is seen
    ended = os.pidfd_open(server)
    if not _relayed(reading, ended, run):
        sys.stderr.write(f"a line of more than {MAX_LINE} bytes: the server is ended\n")
        sys.stderr.flush()
        _kill(server)
        return 1
    os.close(1)  # the end of the output is the end of the server for the package, even while the process lives
    if ended not in select.select([ended, run], [], [])[0] and not select.select([ended], [], [], GRACE_S)[0]:
        _kill(server)  # the run has left, and the server ignores the end of its input
    return os.waitstatus_to_exitcode(os.waitpid(server, 0)[1]) & 0xFF


def _become(command: Sequence[str], writing: int) -> NoReturn:
    os.dup2(writing, 1)
    try:
        os.execvp(command[0], list(command))
    except OSError as cause:
        sys.stderr.write(f"{command[0]}: {cause.strerror}\n")
        sys.stderr.flush()
        os._exit(127)


def _kill(server: int) -> None:
    """End the server, and this process with its group if it leads one."""
    os.kill(server, signal.SIGKILL)
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)


def _relayed(reading: int, ended: int, run: int) -> bool:
    """Pass everything on until the end; False at a line that is too long, of which MAX_LINE bytes were passed on.

    The server's death is an end, too (`ended` is then readable): processes that it started may keep its output open. So
    is the end of the `run`.
    """
    length = 0
    while reading in select.select([reading, ended, run], [], [])[0] and (chunk := os.read(reading, CHUNK)):
        end = chunk.find(b"\n")
        length += len(chunk) if end < 0 else end
        if length > MAX_LINE:
            return False
        if end >= 0:
            length = len(chunk) - chunk.rfind(b"\n") - 1
        rest = memoryview(chunk)
        while rest:
            try:
                rest = rest[os.write(1, rest) :]
            except BrokenPipeError:  # the run has left
                return True
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
