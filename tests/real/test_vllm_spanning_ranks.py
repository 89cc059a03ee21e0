"""Two ranks of an actor on the slots of one vLLM engine of two workers: with the Python of .venv-vllm."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlcore.report import metrics
from rlcore.testing.marks import needs
from rlcore.testing.tiny import write_tiny_model

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(500),
    needs("vllm", "`make setup-vllm`, then .venv-vllm/bin/python -m pytest -m real"),
]

REWARD = '''
"""A score that differs between samples, so that every step moves the policy."""


def spread(prompts, completions, **columns):
    return [float(sum(map(ord, str(completion))) % 7) for completion in completions]
'''


@pytest.mark.parametrize(("weights", "nodes"), [("ipc", 1), ("tcp", 2)])
def test_an_engine_of_two_workers_sleeps_while_two_ranks_train_and_samples_with_their_weights(
    tmp_path: Path, weights: str, nodes: int
) -> None:
    """The policy moves far with every step: were an older version sampled from, its log-probs would be other ones."""
    write_tiny_model(tmp_path / "tiny", num_attention_heads=2, hidden_size=64)
    (tmp_path / "spread.py").write_text(REWARD)
    prompts = [{"prompt": f"What is {n} + 1?", "answer": f"{n + 1}"} for n in range(8)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    values: dict[str, Any] = {
        "model.path": tmp_path / "tiny",
        "model.tokenizer": "bytes",
        "data.sources.train.path": tmp_path / "train.jsonl",
        "data.max_prompt_tokens": 32,
        "actor.data_parallel": 2,
        "actor.sharding": "fsdp2",
        "actor.lr": "1e-2",
        "rollout.backend": "vllm",
        "rollout.pool": "rollout",
        "rollout.weight_sync": weights,
        "rollout.max_tokens": 16,
        "rollout.samples_per_prompt": 4,
        "plugins.vllm.tensor_parallel": 2,
        "plugins.vllm.nodes": nodes,
        "plugins.vllm.kv_cache_gib": 0.05,
        "plugins.vllm.max_model_len": 128,
        "plugins.vllm.enforce_eager": "true",
        "reward.functions.spread.fn": f"{tmp_path / 'spread.py'}:spread",
        "cluster.train_pool": "train",
        "cluster.pools.train.colocates": "[rollout]",
        "cluster.threads": 1,
        "train.prompts_per_step": 4,
        "train.max_steps": 2,
        "train.dir": tmp_path,
        "train.name": "run",
    }
    command = [sys.executable, "-m", "rlcore", "train", *(f"{key}={value}" for key, value in values.items())]
    done = subprocess.run(command, text=True, capture_output=True, timeout=450, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    steps = [row for row in metrics.read(tmp_path / "run") if "reward/mean" in row]
    assert len(steps) == 2
    for number, step in enumerate(steps):
        assert step["actor/grad_norm"] > 0.0
        assert step["policy/rollout_logprob_diff"] < 1e-3
        assert {"time/drain_s", "time/admit_s"} <= step.keys()
        rows = (tmp_path / "run" / "trajectories" / f"step_{number + 1:06d}.jsonl").read_text().splitlines()
        assert {version for row in rows for _, version in json.loads(row)["versions"]} == {number}
