"""Two ranks of an actor, sharded or not, on the slots of two vLLM engines, on Ray: with the Python of .venv-vllm."""

import json
import math
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
    pytest.mark.timeout(400),
    needs("vllm", "`make setup-vllm`, then .venv-vllm/bin/python -m pytest -m real"),
]

ROOT = Path(__file__).parent.parent.parent
EXAMPLE = ROOT / "examples" / "ray_vllm"
DEADLINE_S = 360.0
NUM_STEPS = 3
REWARD = '''
"""A score that differs between samples, so that every step moves the policy."""


def spread(prompts, completions, **columns):
    return [float(sum(map(ord, str(completion))) % 7) for completion in completions]
'''


def trained(directory: Path, sharding: str, weights: str) -> Path:
    """A run of a random model that vLLM can serve; its directory. The judge is the example's."""
    write_tiny_model(directory / "tiny", num_attention_heads=1)
    (directory / "spread.py").write_text(REWARD)
    for name, added in (("train", 1), ("heldout", 2)):
        prompts = [{"prompt": f"What is {n} + {added}?", "answer": f"{n + added}"} for n in range(8)]
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    values: dict[str, Any] = {
        "model.path": directory / "tiny",
        "model.tokenizer": "bytes",
        "data.sources.train.path": directory / "train.jsonl",
        "eval.sources.heldout.path": directory / "heldout.jsonl",
        "actor.data_parallel": 2,
        "actor.sharding": sharding,
        "actor.lr": "1e-2",
        "rollout.weight_sync": weights,
        "reward.functions.spread.fn": f"{directory / 'spread.py'}:spread",
        "cluster.train_pool": "train",
        "cluster.pools.train.colocates": "[rollout,reward]",
        "plugins.ray.object_store_gib": 0.1,
        "train.max_steps": NUM_STEPS,
        "train.dir": directory,
        "train.name": "run",
    }
    command = [sys.executable, "-m", "rlcore", "train", str(EXAMPLE / "config.yaml"), str(EXAMPLE / "ci_vllm.yaml")]
    command += [f"{key}={value}" for key, value in values.items()]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return directory / "run"


@pytest.mark.parametrize(("sharding", "weights"), [("fsdp2", "disk"), ("none", "tcp"), ("fsdp2", "ipc")])
def test_two_ranks_train_on_the_slots_of_both_engines_which_sample_with_what_they_hand_over(
    tmp_path: Path, sharding: str, weights: str
) -> None:
    """The policy moves far with every step: were an older version sampled from, its log-probs would be other ones."""
    run = trained(tmp_path, sharding, weights)
    steps = [row for row in metrics.read(run) if "reward/mean" in row]
    assert len(steps) == NUM_STEPS
    for number, step in enumerate(steps):
        assert math.isfinite(step["reward/mean"])
        assert step["reward/failed"] == 0.0
        assert step["actor/grad_norm"] > 0.0
        assert step["policy/rollout_logprob_diff"] < 1e-3
        assert {"time/drain_s", "time/admit_s"} <= step.keys(), "both engines slept while the actor trained"
        pools = {name: busy for name, busy in step.items() if name.startswith("time/pool/")}
        assert pools.keys() == {"time/pool/rollout/busy_frac", "time/pool/reward/busy_frac"}
        assert all(0.0 < busy <= 1.0 for busy in pools.values())
        rows = (run / "trajectories" / f"step_{number + 1:06d}.jsonl").read_text().splitlines()
        assert {version for row in rows for _, version in json.loads(row)["versions"]} == {number}
    calls = [json.loads(line) for line in (run / "reward_calls.jsonl").read_text().splitlines()]
    assert {(call["target"], call["status"]) for call in calls} == {("judge", "ok")}
    assert len(calls) == 8 * NUM_STEPS
