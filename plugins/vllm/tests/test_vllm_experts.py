"""vLLM samples with every version of a mixture of experts. With the Python of .venv-vllm (`make vllm`)."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlcore.testing.marks import needs
from rlcore.testing.tiny import write_tiny_model

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(600),
    needs("vllm", "`make setup-vllm`, then .venv-vllm/bin/python -m pytest -m real"),
]

DEADLINE_S = 560.0
SPREAD = "def spread(prompts, completions, **columns): return [float(sum(map(ord, str(x))) % 7) for x in completions]"
"""A reward that differs between samples, so that every step moves the policy."""


def test_experts_that_a_cpu_packs_are_packed_again_with_each_version(tmp_path: Path) -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    model = write_tiny_model(tmp_path / "model", "Qwen3Moe", **experts, **sizes)
    (tmp_path / "spread.py").write_text(SPREAD)
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"prompt": "say {number}"}}\n' for number in range(12)))
    settings = (
        *(f"model.path={model}", "model.tokenizer=bytes", f"data.sources.all.path={tmp_path / 'prompts.jsonl'}"),
        f"reward.functions.spread.fn={tmp_path / 'spread.py'}:spread",
        *("rollout.backend=vllm", "rollout.max_tokens=16", "rollout.samples_per_prompt=4", "train.prompts_per_step=4"),
        *("plugins.vllm.max_model_len=128", "actor.lr=1e-3", "train.max_steps=3", f"train.dir={tmp_path}"),
        "train.name=run",
        "cluster.threads=1",
    )
    command = [sys.executable, "-m", "rlcore", "train", *settings]
    done = subprocess.run(command, text=True, capture_output=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    follows = re.findall(
        r"follows: version (\d) of the weights, (\S+) per token", (tmp_path / "run" / "log.txt").read_text()
    )
    assert [version for version, _ in follows] == ["0", "1", "2"]
    assert all(float(difference) < 1e-5 for _, difference in follows)
