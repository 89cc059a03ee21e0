"""A command of rlcore in a separate process, waited for through the signals that reach both."""

import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path


def run_own_command(arguments: Sequence[str], output: Path) -> int:
    """Run `rlcore ARGUMENTS`, its output appended to the file; the exit code, 128 + n where signal n killed it.

    Ctrl-C reaches the command as well, which ends in good order; SIGTERM is passed on to it. Main thread only.
    """
    with output.open("ab") as file:
        command = [sys.executable, "-m", "rlcore", *arguments]
        child = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    before = signal.signal(signal.SIGTERM, lambda signum, frame: child.send_signal(signum))
    try:
        while True:
            with suppress(KeyboardInterrupt):
                returned = child.wait()
                return 128 - returned if returned < 0 else returned
    finally:
        signal.signal(signal.SIGTERM, before)
