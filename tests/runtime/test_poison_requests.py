"""Whole runs with requests that kill their replica: these fail as data, and the run continues with its restarts."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.fault, pytest.mark.timeout(150)]

PARTS = '''
import os, signal, sys
from contextlib import aclosing
from rlcore import WorkerClass, hookimpl
from rlcore.contracts.rollout import RolloutWorker
from rlcore.testing.null import NullReplica

RLCORE_API = "1"


class Poisoned(NullReplica):
    """Dies while it serves a request whose prompt or conversation has the word 'poison'."""

    async def generate(self, requests):
        if any(b"poison" in bytes(token for token in request.token_ids if token < 256) for request in requests):
            os.kill(os.getpid(), signal.SIGKILL)
        async with aclosing(super().generate(requests)) as completions:
            async for completion in completions:
                yield completion


@hookimpl
def rlcore_worker_classes():
    return [WorkerClass(RolloutWorker, "poisoned", Poisoned, isolated=True)]
'''


def trained(directory: Path, poisons: dict[int, str], steps: int) -> list[dict[str, Any]]:
    """The records of a run on one replica, in which the prompts of these numbers are poison."""
    (directory / "parts.py").write_text(PARTS)
    texts = [poisons.get(number, f"Say something, number {number}.") for number in range(16)]
    prompts = directory / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text, "answer": ""}) + "\n" for text in texts))
    config = {
        "model": {"path": "", "tokenizer": "bytes"},
        "data": {"sources": {"train": {"path": str(prompts)}}},
        "rollout": {"backend": "poisoned", "samples_per_prompt": 2, "max_tokens": 24},
        "actor": {"backend": "null"},
        "reward": {"error_budget_frac": 1.0, "functions": {"letters": {"fn": "count_letter", "children": 1}}},
        "train": {"dir": str(directory / "runs"), "name": "run", "max_steps": steps, "prompts_per_step": 16},
        "plugins": {"null": {}},
    }
    (directory / "config.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "rlcore", "train", "config.json", "--plugin", "parts.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=140)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    files = sorted((directory / "runs" / "run" / "trajectories").glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_two_poisons_among_sixteen_prompts_fail_in_every_epoch_and_all_else_is_trained_on(tmp_path: Path) -> None:
    rows = trained(tmp_path, {4: "poison", 9: "more poison"}, steps=2)
    assert len(rows) == 2 * 16 * 2
    failed = [row for row in rows if row["status"] == "failed"]
    assert {row["id"]["prompt"] for row in failed} == {"train/4", "train/9"}
    assert len(failed) == 2 * 2 * 2
    assert all("replicas died 4 times while it was served" in json.dumps(row) for row in failed)
    assert {row["status"] for row in rows} == {"ok", "failed"}
    log = (tmp_path / "runs" / "run" / "log.txt").read_text()
    assert log.count("its samples have failed") == 4
    metrics = [json.loads(line) for line in (tmp_path / "runs" / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["reward/failed"] for row in metrics if "reward/failed" in row] == [4.0, 4.0]
