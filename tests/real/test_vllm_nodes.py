"""Engines of vLLM over two nodes of a Ray cluster, a rollout and a reward model: with the Python of .venv-vllm."""

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlcore.report import metrics
from rlcore.testing.leaks import descendants, is_running
from rlcore.testing.marks import needs
from rlcore.testing.tiny import write_tiny_classifier, write_tiny_model

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(500),
    pytest.mark.xdist_group("machine"),
    needs("vllm", "`make setup-vllm`, then .venv-vllm/bin/python -m pytest -m real"),
]

REWARD = '''
"""A score that differs between samples, so that every step moves the policy."""


def spread(prompts, completions, **columns):
    return [float(sum(map(ord, str(completion))) % 7) for completion in completions]
'''
CLUSTER = """
import os, sys
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
from ray.cluster_utils import Cluster
cluster = Cluster()
for _ in range(3):
    node = cluster.add_node(num_cpus=2, object_store_memory=100 * 2**20, include_dashboard=False)
cluster.wait_for_nodes(60)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""
DEADLINE_S = 400.0


@contextmanager
def three_nodes() -> Iterator[tuple[str, int]]:
    """A Ray cluster of nodes with two CPUs each: its address and the process that has it."""
    command = [sys.executable, "-c", CLUSTER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip(), process.pid
        finally:
            process.communicate("", timeout=60)


def settings_of(directory: Path) -> dict[str, Any]:
    """A run of three steps, unless a test says fewer, whose files it writes."""
    prompts = [{"prompt": f"What is {n} + 1?", "answer": f"{n + 1}"} for n in range(8)]
    (directory / "train.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return {
        "model.path": directory / "tiny",
        "model.tokenizer": "bytes",
        "data.sources.train.path": directory / "train.jsonl",
        "data.max_prompt_tokens": 32,
        "rollout.max_tokens": 16,
        "rollout.samples_per_prompt": 4,
        "cluster.backend": "ray",
        "cluster.threads": 1,
        "train.prompts_per_step": 4,
        "train.max_steps": 3,
        "train.dir": directory,
        "train.name": "run",
    }


def with_rollout(directory: Path) -> dict[str, Any]:
    """An actor, and the rollout's engine of two workers on two nodes."""
    write_tiny_model(directory / "tiny", num_attention_heads=2, hidden_size=64)
    (directory / "spread.py").write_text(REWARD)
    return {
        **settings_of(directory),
        "actor.lr": "1e-2",
        "rollout.backend": "vllm",
        "rollout.weight_sync": "nccl",
        "rollout.weights_transport": "gloo",
        "plugins.vllm.tensor_parallel": 2,
        "plugins.vllm.nodes": 2,
        "plugins.vllm.kv_cache_gib": 0.05,
        "plugins.vllm.max_model_len": 128,
        "plugins.vllm.enforce_eager": "true",
        "reward.functions.spread.fn": f"{directory / 'spread.py'}:spread",
        "cluster.pools.rollout.nodes": 2,
    }


def with_reward_model(directory: Path) -> dict[str, Any]:
    """The null actor, a reward model on transformers, and the same model on an engine of two workers on two nodes."""
    path = write_tiny_classifier(directory / "judge", architecture="Llama", labels=1, num_heads=2, hidden_size=64)
    models, rewards = "plugins.reward_loop.models", "plugins.reward_loop.rewards"
    return {
        **settings_of(directory),
        "model.path": "none",
        "actor.backend": "null",
        "rollout.backend": "null",
        f"{rewards}.one.kind": "model",
        f"{rewards}.one.served_by": "alone",
        f"{models}.alone.path": path,
        f"{models}.alone.tokenizer": "bytes",
        f"{models}.alone.pool": "main",
        f"{models}.alone.cpus": 0.5,
        f"{rewards}.over.kind": "model",
        f"{rewards}.over.served_by": "spread",
        f"{models}.spread.path": path,
        f"{models}.spread.tokenizer": "bytes",
        f"{models}.spread.backend": "vllm",
        f"{models}.spread.nodes": 2,
        f"{models}.spread.deadline_s": 200,
        f"{models}.spread.options": "{enforce_eager: true, kv_cache_memory_bytes: 67108864}",
        "cluster.pools.reward.nodes": 2,
        "train.max_steps": 1,
    }


def workers_of(cluster: int) -> list[tuple[str, int]]:
    """The names and processes of vLLM's workers below the process of a cluster, in order."""
    found = []
    for pid in descendants(cluster):
        try:
            title = Path(f"/proc/{pid}/cmdline").read_text().strip("\0")
        except OSError:
            continue
        if title.startswith("VLLM::Worker"):
            found.append((title, pid))
    return sorted(found)


def raylets_of(pid: int) -> set[int]:
    """The processes of Ray's nodes above a process: one."""
    return {above.pid for above in psutil.Process(pid).parents() if above.name() == "raylet"}


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")  # ray.init() would make a token and keep it
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))


def run_on_nodes(directory: Path, values: dict[str, Any], *arguments: str, kills: bool) -> list[dict[str, float]]:
    """The metrics of the steps of a run on three nodes, whose engine has workers on two of them.

    `kills`: the second one, after the first step.
    """
    killed, apart = 0, False
    with three_nodes() as (address, cluster), (directory / "output").open("w") as output:
        overrides = [f"{key}={value}" for key, value in {**values, "plugins.ray.address": address}.items()]
        command = [sys.executable, "-m", "rlcore", "train", *arguments, *overrides]
        process = subprocess.Popen(command, stdout=output, stderr=output)
        ends_at = time.monotonic() + DEADLINE_S
        try:
            while process.poll() is None and time.monotonic() < ends_at:
                time.sleep(0.2)
                if not apart and (directory / "run" / "log.txt").exists() and "launched: " in log_of(directory):
                    (first, one), (second, other) = workers_of(cluster)
                    assert (first, second) == ("VLLM::Worker_TP0", "VLLM::Worker_TP1")
                    apart = raylets_of(one).isdisjoint(raylets_of(other))
                if kills and not killed and (directory / "run" / "metrics.jsonl").exists():
                    [_, (_, killed)] = workers_of(cluster)
                    os.kill(killed, signal.SIGKILL)
        finally:
            process.kill()
            process.wait()
        assert process.returncode == 0, (directory / "output").read_text()[-4000:]
    assert apart, "the workers are on two nodes"
    assert not (killed and is_running(killed))
    steps = [row for row in metrics.read(directory / "run") if "reward/mean" in row]
    assert len(steps) == values["train.max_steps"]
    return steps


def log_of(directory: Path) -> str:
    return (directory / "run" / "log.txt").read_text()


def test_an_engine_over_two_nodes_follows_the_actor_also_after_a_worker_died(tmp_path: Path) -> None:
    steps = run_on_nodes(tmp_path, with_rollout(tmp_path), kills=True)
    assert "rollout[0.1]: a worker of vLLM died" in log_of(tmp_path)
    assert "rollout[0]: restarted" in log_of(tmp_path)
    for number, step in enumerate(steps):
        assert step["actor/grad_norm"] > 0.0
        assert step["policy/rollout_logprob_diff"] < 1e-3
        rows = (tmp_path / "run" / "trajectories" / f"step_{number + 1:06d}.jsonl").read_text().splitlines()
        assert {version for row in rows for _, version in json.loads(row)["versions"]} == {number}


def test_a_reward_model_over_two_nodes_scores_as_on_one(tmp_path: Path) -> None:
    run_on_nodes(tmp_path, with_reward_model(tmp_path), "--plugin", "null", "--plugin", "vllm", kills=False)
    rows = list(metrics.read_trajectories(tmp_path / "run", 1))
    assert [row["status"] for row in rows] == ["ok"] * 16
    for row in rows:
        assert row["components"]["over"] == pytest.approx(row["components"]["one"], abs=1e-3)
    assert len({round(row["components"]["one"], 3) for row in rows}) > 8, "scores that differ"
