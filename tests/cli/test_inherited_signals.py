"""Signals as a parent left them: children keep their exit codes, and a question without a run ends nothing."""

import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

SCRIPT = """
import os, signal, subprocess, sys
from rlcore.cli.inherited_signals import reset_inherited_signals
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
reset_inherited_signals()
os.kill(os.getpid(), signal.SIGUSR1)
code = "import signal; print(signal.getsignal(signal.SIGUSR1)); raise SystemExit(7)"
print(subprocess.call([sys.executable, "-c", code]))
"""


def test_children_keep_their_exit_codes_and_a_question_without_a_run_ends_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, timeout=60)
    assert (done.returncode, done.stdout.split()) == (0, [str(signal.SIG_DFL).encode(), b"7"])


BLOCKED = """
import signal, subprocess, sys
from rlcore.cli.inherited_signals import reset_inherited_signals
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
reset_inherited_signals()
code = "import signal; print(len(signal.pthread_sigmask(signal.SIG_BLOCK, ())))"
print(subprocess.call([sys.executable, "-c", code]))
"""


def test_no_signal_stays_blocked_here_and_in_children() -> None:
    done = subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, timeout=60)
    assert (done.returncode, done.stdout.split()) == (0, [b"0", b"0"])


def test_the_command_resets_them_first() -> None:
    """`rlcore --version`, started by a parent that ignores SIGCHLD, leaves both signals as a run needs them."""
    script = (
        "import signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); sys.argv[1:] = ['--version']\n"
        "from rlcore.cli import main\n"
        "main()\n"
        "sys.exit(signal.getsignal(signal.SIGCHLD) != signal.SIG_DFL or not callable(signal.getsignal(signal.SIGUSR1)))"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize(("command", "work"), [("train", "_train"), ("resume", "train_planned")])
def test_a_terminal_that_goes_before_the_run_has_begun_ends_nothing(command: str, work: str, tmp_path: Path) -> None:
    """Planning may take minutes, and has no log yet."""
    (tmp_path / "config.yaml").write_text("{}")
    script = (
        "import os, signal, sys\nfrom rlcore.plugins import planning\n"
        f"from rlcore.cli import {command} as command\n"
        "def gone(*arguments, **named):\n    os.kill(os.getpid(), signal.SIGHUP)\n    return 0\n"
        f"command.{work} = planning.plan_run = gone\n"
        f"sys.exit(command.run({[str(tmp_path)] if command == 'resume' else []!r}))"
    )
    done = subprocess.run([sys.executable, "-c", script], timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_ctrl_c_while_the_command_is_imported_is_one_line() -> None:
    script = (
        "import sys\n"
        "class Interrupting:\n"
        "    @staticmethod\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        if name == 'rlcore.cli.console':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupting)\n"
        "from rlcore.__main__ import main\n"
        "sys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "rlcore: interrupted\n")
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["scripts"]["rlcore"] == "rlcore.__main__:main"
