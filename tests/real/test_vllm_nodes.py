"""An engine of vLLM over two nodes of a Ray cluster: with the Python of .venv-vllm."""

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
from rlcore.testing.tiny import write_tiny_model

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
    node = cluster.add_node(num_cpus=1, object_store_memory=100 * 2**20, include_dashboard=False)
cluster.wait_for_nodes(60)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""
DEADLINE_S = 400.0


@contextmanager
def three_nodes() -> Iterator[tuple[str, int]]:
    """A Ray cluster of nodes with one CPU each: its address and the process that has it."""
    command = [sys.executable, "-c", CLUSTER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip(), process.pid
        finally:
            process.communicate("", timeout=60)


def settings_of(directory: Path, address: str) -> dict[str, Any]:
    """The actor on one node, and an engine of two workers on two others."""
    return {
        "model.path": directory / "tiny",
        "model.tokenizer": "bytes",
        "data.sources.train.path": directory / "train.jsonl",
        "data.max_prompt_tokens": 32,
        "actor.lr": "1e-2",
        "rollout.backend": "vllm",
        "rollout.weight_sync": "nccl",
        "rollout.weights_transport": "gloo",
        "rollout.max_tokens": 16,
        "rollout.samples_per_prompt": 4,
        "plugins.vllm.tensor_parallel": 2,
        "plugins.vllm.nodes": 2,
        "plugins.vllm.kv_cache_gib": 0.05,
        "plugins.vllm.max_model_len": 128,
        "plugins.vllm.enforce_eager": "true",
        "plugins.ray.address": address,
        "reward.functions.spread.fn": f"{directory / 'spread.py'}:spread",
        "cluster.backend": "ray",
        "cluster.pools.rollout.nodes": 2,
        "cluster.threads": 1,
        "train.prompts_per_step": 4,
        "train.max_steps": 3,
        "train.dir": directory,
        "train.name": "run",
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


def test_an_engine_over_two_nodes_follows_the_actor_also_after_a_worker_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")  # ray.init() would make a token and keep it
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    write_tiny_model(tmp_path / "tiny", num_attention_heads=2, hidden_size=64)
    (tmp_path / "spread.py").write_text(REWARD)
    prompts = [{"prompt": f"What is {n} + 1?", "answer": f"{n + 1}"} for n in range(8)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    killed, apart = 0, False
    with three_nodes() as (address, cluster), (tmp_path / "output").open("w") as output:
        values = settings_of(tmp_path, address)
        command = [sys.executable, "-m", "rlcore", "train", *(f"{key}={value}" for key, value in values.items())]
        process = subprocess.Popen(command, stdout=output, stderr=output)
        ends_at = time.monotonic() + DEADLINE_S
        try:
            while process.poll() is None and time.monotonic() < ends_at:
                time.sleep(0.2)
                if not killed and (tmp_path / "run" / "metrics.jsonl").exists():
                    (first, one), (second, killed) = workers_of(cluster)
                    assert (first, second) == ("VLLM::Worker_TP0", "VLLM::Worker_TP1")
                    apart = raylets_of(one).isdisjoint(raylets_of(killed))
                    os.kill(killed, signal.SIGKILL)
        finally:
            process.kill()
            process.wait()
        assert process.returncode == 0, (tmp_path / "output").read_text()[-4000:]
    assert apart, "the workers are on two nodes"
    assert not is_running(killed)
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "rollout[0.1]: a worker of vLLM died" in log
    assert "rollout[0]: restarted" in log
    steps = [row for row in metrics.read(tmp_path / "run") if "reward/mean" in row]
    assert len(steps) == 3
    for number, step in enumerate(steps):
        assert step["actor/grad_norm"] > 0.0
        assert step["policy/rollout_logprob_diff"] < 1e-3
        rows = (tmp_path / "run" / "trajectories" / f"step_{number + 1:06d}.jsonl").read_text().splitlines()
        assert {version for row in rows for _, version in json.loads(row)["versions"]} == {number}
