"""A judge on vLLM that is killed while scores are out: it comes back, and what it owed is asked once more.

Runs with the Python of .venv-vllm (`make vllm`).
"""

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
from collections import Counter
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from rlcore.plugins.planning import plan_run
from rlcore.runtime.launch import launch
from rlcore.testing import write_prompts
from rlcore.testing.leaks import descendants, leaks
from rlcore.testing.marks import needs
from rlcore.testing.rewards import make_trajectory, stream_of
from rlcore.types import Lane, RewardStatus, ScoredTrajectory

MODEL = Path(__file__).resolve().parents[3] / ".models" / "smollm2-135m-instruct"
NUM_SAMPLES = 12
DEADLINE_S = 200.0


@pytest.mark.real
@pytest.mark.timeout(300)
@needs("vllm", "`make setup-vllm`, then .venv-vllm/bin/python -m pytest -m real")
def test_a_judge_whose_engine_is_killed_comes_back_and_its_requests_are_retried(tmp_path: Path) -> None:
    """In a separate process, for vLLM warns."""
    command = [sys.executable, "-W", "ignore", __file__, str(tmp_path)]
    done = subprocess.run(command, text=True, capture_output=True, timeout=260, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    results = json.loads((tmp_path / "told.json").read_text())
    before, outstanding = results["before"], results["owed"]
    assert before + outstanding == NUM_SAMPLES
    assert before > 0, "scores were out when it was killed"
    assert results["statuses"] == {RewardStatus.OK.value: NUM_SAMPLES}
    assert results["samples"] == NUM_SAMPLES, "each once"
    assert 0 < results["retries"] <= outstanding, "what it had not answered, once, and nothing else"
    assert results["ejections"] == 1
    assert (results["ejected"], results["in_flight"]) == (0.0, 0)
    assert [line for line in results["log"] if line.startswith("judge[0]: ")][1:] == ["judge[0]: restarted"]
    assert len(results["engines"]) == 2
    calls = [json.loads(line) for line in (tmp_path / "reward_calls.jsonl").read_text().splitlines()]
    assert {call["status"] for call in calls} == {"ok"}
    assert len({call["id"] for call in calls}) == len(calls) == NUM_SAMPLES
    assert all(0.0 <= score <= 10.0 for score in results["scores"])


def config(directory: Path) -> dict[str, Any]:
    """One judge, whose answers take some seconds."""
    model = {
        "path": str(MODEL),
        "backend": "vllm",
        "threads": 1,
        "max_tokens": 512,
        "deadline_s": DEADLINE_S,
        "options": {"enforce_eager": True, "kv_cache_memory_bytes": 2**27, "max_num_seqs": 4},
    }
    judge = {
        "template": "How good is this answer, from 0 to 10? {response}",
        "max_tokens": 96,
        "options": {"regex": r'\{"thought": "[a-z ,]{60,80}", "score": (10|[0-9])\}'},
    }
    return {
        "model": {"path": "", "tokenizer": "bytes"},
        "data": {"sources": {"train": {"path": str(write_prompts(directory / "prompts.jsonl", 4))}}},
        "rollout": {"backend": "null"},
        "actor": {"backend": "null"},
        "train": {"dir": str(directory), "name": "run", "max_steps": 1},
        "plugins": {
            "null": {},
            "vllm": {},
            "reward_loop": {
                "rewards": {"graded": {"kind": "judge", "served_by": "judge", "judge": judge}},
                "models": {"judge": model},
            },
        },
    }


def engines() -> set[int]:
    """The processes that compute for a vLLM engine below this one."""
    found = set()
    for process in descendants(os.getpid()):
        try:
            title = Path(f"/proc/{process}/cmdline").read_bytes()
        except OSError:  # it has just ended
            continue
        if b"EngineCore" in title:
            found.add(process)
    return found


def noted(name: str) -> list[str]:
    """The lines that are logged under this name from now on."""
    lines: list[str] = []

    class Noting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logging.getLogger(name).addHandler(Noting())
    return lines


async def killed(directory: Path) -> dict[str, Any]:
    """Kill the judge's engine when the first scores are in; what came of all of them."""
    samples = [make_trajectory(index // 4, index % 4) for index in range(NUM_SAMPLES)]
    scored: list[ScoredTrajectory] = []
    before, log = 0, noted("rlcore.cluster.replica")
    async with asyncio.timeout(DEADLINE_S + 40.0), launch(plan_run([config(directory)], []), directory) as live:
        [first] = engines()
        async with aclosing(live.reward.score(stream_of(samples), Lane.TRAIN)) as results:  # type: ignore[type-var]
            async for result in results:
                scored.append(result)
                if not before:
                    before = len(scored)
                    os.kill(first, signal.SIGKILL)
        numbers, second = live.reward.metrics(), engines()
        after = live.reward.metrics()
    return {
        "before": before,
        "owed": NUM_SAMPLES - before,
        "statuses": Counter(sample.reward.status.value for sample in scored),
        "scores": [sample.reward.components["graded"] for sample in scored],
        "samples": len({sample.trajectory.id for sample in scored}),
        "retries": numbers["reward/judge/num_retries"],
        "ejections": numbers["reward/judge/num_ejections"],
        "ejected": after["reward/judge/ejected"],
        "in_flight": after["reward/judge/in_flight_max"],
        "engines": sorted({first} | second),
        "log": log,
    }


def main(directory: Path) -> None:
    with leaks():
        results = asyncio.run(killed(directory))
    (directory / "told.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
