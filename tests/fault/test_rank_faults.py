"""A rank of the actor that dies: the run ends, says so, names its last checkpoint, and leaves no process. One that is
stopped is named, and the run completes when it continues."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlcore.testing.leaks import descendants, is_running
from rlcore.testing.tiny import write_tiny_model

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300), pytest.mark.xdist_group("machine")]

DEADLINE_S = 120.0


def ranks_of(run: int) -> list[int]:
    """The processes of the actor's ranks: under `local` only they are configured to use the loopback interface."""
    found = []
    for pid in sorted(descendants(run)):
        try:
            if b"GLOO_SOCKET_IFNAME=lo" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(pid)
        except OSError:
            continue
    return found


@contextmanager
def training(directory: Path, **settings: object) -> Iterator[subprocess.Popen[str]]:
    """A run of two ranks that has saved its first checkpoint."""
    prompts = directory / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"say a, {n}", "answer": "a"}) + "\n" for n in range(400)))
    values = {
        "model.path": write_tiny_model(directory / "tiny"),
        "model.tokenizer": "bytes",
        "data.sources.all.path": prompts,
        "rollout.samples_per_prompt": 2,
        "rollout.max_tokens": 8,
        "reward.functions.letters.fn": "count_letter",
        "actor.data_parallel": 2,
        "actor.sharding": "fsdp2",
        "train.dir": directory / "runs",
        "train.name": "run",
        "train.max_steps": 4000,
        "train.prompts_per_step": 2,
        "checkpoint.every_steps": 1,
        "cluster.threads": 1,
    }
    command = [sys.executable, "-m", "rlcore", "train", "--plugin", "null"]
    command += [f"{key}={value}" for key, value in (values | settings).items()]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as run:
        try:
            wait_for("a checkpoint", lambda: bool(list(checkpoints(directory).glob("step_*"))) or ended(run))
            yield run
        finally:
            run.kill()


def checkpoints(directory: Path) -> Path:
    """The directory of the run's checkpoints."""
    return directory / "runs" / "run" / "checkpoints"


def ended(run: subprocess.Popen[str]) -> bool:
    """False while the run continues; fails with its last output if it has ended too early."""
    assert run.poll() is None, run.communicate()[1]
    return False


def wait_for(what: str, holds: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
    """Return when it holds; fail when it does not in time."""
    ends_at = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < ends_at, f"{what}: not within {deadline_s:g} s"
        time.sleep(0.05)


@pytest.mark.parametrize("slices", [1, 2])
def test_a_dead_rank_ends_the_run_with_its_last_checkpoint_named_and_nothing_is_left(
    tmp_path: Path, slices: int
) -> None:
    with training(tmp_path, **{"actor.context_parallel": slices}) as run:
        everything, ranks = descendants(run.pid), ranks_of(run.pid)
        assert len(ranks) == 2
        os.kill(ranks[1], signal.SIGKILL)
        _, errors = run.communicate(timeout=60)
    assert run.returncode == 2, errors
    last = errors.strip().splitlines()[-1]
    assert "actor[0" in last  # by the first to notice: the process that watched it, or a rank that waited for it
    assert str(checkpoints(tmp_path) / "step_") in last
    wait_for("the end of every process", lambda: not any(map(is_running, everything)))


def test_ranks_end_with_a_killed_driver(tmp_path: Path) -> None:
    with training(tmp_path) as run:
        everything = descendants(run.pid)
        assert set(ranks_of(run.pid)) <= everything
        assert len(ranks_of(run.pid)) == 2
        run.kill()
        wait_for("the end of every process", lambda: not any(map(is_running, everything)), 3.0)


def test_a_stopped_rank_is_named_and_the_run_completes_when_it_continues(tmp_path: Path) -> None:
    log = tmp_path / "runs" / "run" / "log.txt"
    with training(tmp_path, **{"cluster.stuck_s": 3, "train.max_steps": 30}) as run:
        ranks = ranks_of(run.pid)
        os.kill(ranks[1], signal.SIGSTOP)
        try:
            wait_for("a report", lambda: f"pid {ranks[1]} " in log.read_text("utf-8") or run.poll() is not None)
        finally:
            os.kill(ranks[1], signal.SIGCONT)
        _, errors = run.communicate(timeout=120)
    assert run.returncode == 0, errors
    # the ranks sample, too: the call in which one is stopped may be of either role
    report = r"(?:actor|rollout)\[0\]\.\w+\(\) has (?:not returned|yielded nothing) for .*; (rank \d of 2 .*)"
    found = re.findall(report, log.read_text("utf-8"))
    assert found, log.read_text("utf-8")[-3000:]
    who = rf"rank 1 of 2 \(pid {ranks[1]} on {re.escape(os.uname().nodename)}\) does not answer"
    for line in found:
        assert re.match(rf"{who}; the other ranks are (in \w+ at .*:\d+|without work)$", line), line
