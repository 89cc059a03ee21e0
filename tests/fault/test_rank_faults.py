"""A rank of the actor that dies: the run ends, says so, names its last checkpoint, and leaves no process."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlcore.testing.leaks import descendants, is_running
from rlcore.testing.tiny import write_tiny_model

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

DEADLINE_S = 120.0


def ranks_of(run: int) -> list[int]:
    """The processes of the actor's ranks: under `local` they alone are told to talk over the loopback."""
    found = []
    for each in sorted(descendants(run)):
        try:
            if b"GLOO_SOCKET_IFNAME=lo" in Path(f"/proc/{each}/environ").read_bytes().split(b"\0"):
                found.append(each)
        except OSError:
            continue
    return found


def test_a_dead_rank_ends_the_run_with_its_last_checkpoint_named_and_nothing_is_left(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"say a, {n}", "answer": "a"}) + "\n" for n in range(400)))
    values = {
        "model.path": write_tiny_model(tmp_path / "tiny"),
        "model.tokenizer": "bytes",
        "data.sources.all.path": prompts,
        "rollout.samples_per_prompt": 2,
        "rollout.max_tokens": 8,
        "reward.functions.letters.fn": "count_letter",
        "actor.ranks": 2,
        "actor.sharding": "fsdp2",
        "train.dir": tmp_path / "runs",
        "train.name": "run",
        "train.max_steps": 400,
        "train.prompts_per_step": 2,
        "checkpoint.every_steps": 1,
        "cluster.threads": 1,
    }
    command = [sys.executable, "-m", "rlcore", "train", "--plugin", "null"]
    command += [f"{key}={value}" for key, value in values.items()]
    checkpoints = tmp_path / "runs" / "run" / "checkpoints"
    ends_at = time.monotonic() + DEADLINE_S
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as run:
        try:
            while not list(checkpoints.glob("step_*")):
                assert run.poll() is None, run.communicate()[1]
                assert time.monotonic() < ends_at, "no checkpoint in time"
                time.sleep(0.05)
            everything, ranks = descendants(run.pid), ranks_of(run.pid)
            assert len(ranks) == 2
            os.kill(ranks[1], signal.SIGKILL)
            _, errors = run.communicate(timeout=60)
        finally:
            run.kill()
    assert run.returncode == 2, errors
    last = errors.strip().splitlines()[-1]
    assert "actor[0" in last  # by whoever notices first: the process that watched it, or a rank that waited for it
    assert str(checkpoints / "step_") in last
    while any(map(is_running, everything)):
        assert time.monotonic() < ends_at, "a process of the run is left"
        time.sleep(0.05)
