"""Signals as a parent left them: children keep their exit codes, and a question without a run ends nothing."""

import signal
import subprocess
import sys

SCRIPT = """
import os, signal, subprocess, sys
from rlcore.cli.inherited_signals import mend_inherited_signals
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
mend_inherited_signals()
os.kill(os.getpid(), signal.SIGUSR1)
code = "import signal; print(signal.getsignal(signal.SIGUSR1)); raise SystemExit(7)"
print(subprocess.call([sys.executable, "-c", code]))
"""


def test_children_keep_their_exit_codes_and_a_question_without_a_run_ends_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, timeout=60)
    assert (done.returncode, done.stdout.split()) == (0, [str(signal.SIG_DFL).encode(), b"7"])


def test_the_command_mends_them_first() -> None:
    """`rlcore --version`, started by a parent that ignores SIGCHLD, leaves both signals as a run needs them."""
    script = (
        "import signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); sys.argv[1:] = ['--version']\n"
        "from rlcore.cli import main\n"
        "main()\n"
        "sys.exit(signal.getsignal(signal.SIGCHLD) != signal.SIG_DFL or not callable(signal.getsignal(signal.SIGUSR1)))"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0
