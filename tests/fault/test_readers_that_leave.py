"""Readers of output that go away in every phase of a run: training continues, and log.txt says it."""

import contextlib
import os
import pty
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlcore.report import metrics
from rlcore.testing import write_prompts
from rlcore.testing.null import SETTINGS

pytestmark = [pytest.mark.fault, pytest.mark.timeout(150)]

PARTS = """
import sys, time
from pathlib import Path

HERE = Path(__file__).parent


def reached(phase):
    if phase == (HERE / "phase").read_text() and not (HERE / phase).exists():
        (HERE / phase).touch()
        until = time.monotonic() + 30
        while not (HERE / "gone").exists() and time.monotonic() < until:
            time.sleep(0.01)


async def loud(completions, **columns):
    # both outputs, lines that fill a pipe soon and one without an end
    print("out", "x" * 20000)
    print("err", "x" * 20000, file=sys.stderr)
    print("more", end="")
    sys.stderr.flush()
    reached("sampling")
    return [0.5] * len(completions)


if __name__ == "__main__":
    from rlcore.cli import main
    from rlcore.reward.functions import FunctionRewards
    from rlcore.train import checkpoint

    publish, close = checkpoint.publish, FunctionRewards.close

    def slow_publish(*arguments, **more):
        reached("checkpoint")
        return publish(*arguments, **more)

    async def slow_close(self):
        reached("close")
        await close(self)

    checkpoint.publish, FunctionRewards.close = slow_publish, slow_close
    sys.exit(main())
"""
CONTROLLING = (
    "import fcntl, os, sys, termios\nfcntl.ioctl(0, termios.TIOCSCTTY, 0)\nos.execv(sys.argv[1], sys.argv[1:])"
)
STEPS = 4


def command(directory: Path, phase: str) -> list[str]:
    """A run that waits in this phase until its reader has gone."""
    (directory / "phase").write_text(phase)
    (directory / "parts.py").write_text(PARTS)
    prompts = write_prompts(directory / "prompts.jsonl", 64)
    settings = [*SETTINGS, f"data.sources.all.path={prompts}", "train.name=run", f"train.max_steps={STEPS}"]
    settings += [f"reward.functions.loud.fn={directory / 'parts.py'}:loud", "checkpoint.every_steps=2"]
    return [sys.executable, str(directory / "parts.py"), "train", *settings, "--plugin", "null"]


def until_reached(path: Path, process: "subprocess.Popen[bytes]", ours: int | None = None) -> None:
    """Waits for the phase and reads meanwhile, so that the run does not wait for its reader."""
    if ours is not None:
        os.set_blocking(ours, False)
    until = time.monotonic() + 90
    while not path.exists():
        assert process.poll() is None
        assert time.monotonic() < until, path.name
        with contextlib.suppress(BlockingIOError):
            while ours is not None and os.read(ours, 1 << 16):
                pass
        time.sleep(0.01)


def assert_whole(directory: Path, *words: str) -> None:
    """It trained to its end, no sample failed, and the log has each of the words once."""
    run = directory / "runs" / "run"
    assert [row["step"] for row in metrics.read(run)] == list(range(1, STEPS + 1))
    rows = [row for step in range(1, STEPS + 1) for row in metrics.read_trajectories(run, step)]
    assert {row["status"] for row in rows} == {"ok"}
    assert (run / "checkpoints" / f"step_{STEPS}" / "manifest.json").exists()
    log = (run / "log.txt").read_text()
    assert "Traceback" not in log
    for word in words:
        assert log.count(word) == 1, word


@pytest.mark.parametrize("phase", ["sampling", "checkpoint", "close"])
@pytest.mark.parametrize("gone", ["stderr", "stdout"])
def test_a_reader_of_one_output_that_goes_away_ends_nothing(tmp_path: Path, gone: str, phase: str) -> None:
    outputs = {name: subprocess.PIPE if name == gone else subprocess.DEVNULL for name in ("stdout", "stderr")}
    process = subprocess.Popen(command(tmp_path, phase), cwd=tmp_path, **outputs)
    left = getattr(process, gone)
    until_reached(tmp_path / phase, process, left.fileno())
    left.close()
    (tmp_path / "gone").touch()
    assert process.wait(timeout=100) == 0
    name = "standard error" if gone == "stderr" else "standard output"
    assert_whole(tmp_path, *([f"{name} is gone"] if phase != "close" else []))


@pytest.mark.parametrize("phase", ["sampling", "checkpoint", "close"])
def test_a_terminal_that_goes_away_ends_nothing(tmp_path: Path, phase: str) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", CONTROLLING, *command(tmp_path, phase)],
        stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, cwd=tmp_path,
    )  # fmt: skip
    os.close(theirs)
    until_reached(tmp_path / phase, process, ours)
    os.close(ours)  # the kernel sends SIGHUP to the session
    (tmp_path / "gone").touch()
    assert process.wait(timeout=100) == 0
    assert_whole(tmp_path, "the terminal has gone")


PIPES = {
    "head": "{run} | head -3",
    "head of both": "{run} 2>&1 | head -3",
    "a tee that is killed": "{run} 2>&1 | (tee /dev/null & echo $! > tee; wait) | cat > /dev/null",
    "both closed": "{run} >&- 2>&- <&-",
}


@pytest.mark.parametrize("kind", PIPES)
def test_a_shell_whose_pipe_breaks_ends_nothing(tmp_path: Path, kind: str) -> None:
    run = shlex.join(command(tmp_path, "sampling"))
    line = f"set -o pipefail; {PIPES[kind].format(run=run)}; exit ${{PIPESTATUS[0]}}"
    process = subprocess.Popen(["bash", "-c", line], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=tmp_path)
    until_reached(tmp_path / "sampling", process)
    if kind.startswith("a tee"):
        os.kill(int((tmp_path / "tee").read_text()), signal.SIGKILL)
    (tmp_path / "gone").touch()
    assert process.wait(timeout=100) == 0
    assert_whole(tmp_path, *([] if kind == "both closed" else ["standard output is gone"]))
