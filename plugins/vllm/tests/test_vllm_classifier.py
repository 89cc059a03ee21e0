"""Scalar reward models on vLLM give the scores of transformers.

Runs with the Python of .venv-vllm (`make vllm`).
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlcore.contracts.reward_models import Conversations, RewardModel
from rlcore.report import metrics
from rlcore.testing import write_prompts
from rlcore.testing.marks import needs
from rlcore.testing.tiny import write_tiny_classifier
from rlcore.train import train

ON_VLLM = (
    pytest.mark.real,
    pytest.mark.timeout(240),
    needs("vllm", "`make setup-vllm`, then .venv-vllm/bin/python -m pytest -m real"),
)
NEWLINE = 10
"""The last byte of every conversation without a chat template."""
MODELS: dict[str, dict[str, Any]] = {
    "scalar": {"architecture": "Llama", "labels": 1},
    "chosen": {"architecture": "Qwen2", "labels": 3},
}
SETTINGS: dict[str, dict[str, Any]] = {"scalar": {}, "chosen": {"label": 2, "activation": "softmax"}}


def config_of(directory: Path, models: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A run of one step whose samples are judged by each of these models."""
    return {
        "model": {"path": "", "tokenizer": "bytes"},
        "data": {"sources": {"train": {"path": str(write_prompts(directory / "prompts.jsonl", 8))}}},
        "rollout": {"backend": "null", "samples_per_prompt": 4, "max_tokens": 24},
        "actor": {"backend": "null"},
        "train": {"prompts_per_step": 2, "max_steps": 1, "dir": str(directory), "name": "run"},
        "cluster": {"in_process": True},  # this process imports vllm, once for both models
        "plugins": {
            "null": {},
            "vllm": {},
            "reward_loop": {
                "rewards": {name: {"kind": "model", "served_by": f"{name}_model"} for name in models},
                "models": {
                    f"{name}_model": {
                        "tokenizer": "bytes",
                        "backend": "vllm",
                        "threads": 1,
                        "options": {"enforce_eager": True, "kv_cache_memory_bytes": 2**26},
                        **model,
                    }
                    for name, model in models.items()
                },
            },
        },
    }


def on_vllm(function: Any) -> Any:
    """Mark a test as one that starts an engine."""
    for mark in ON_VLLM:
        function = mark(function)
    return function


@on_vllm
def test_every_score_of_a_run_on_vllm_is_the_one_of_transformers(tmp_path: Path) -> None:
    """In a separate process, for vLLM warns; also where a conversation ends in the model's padding token."""
    for name, model in MODELS.items():
        path = write_tiny_classifier(tmp_path / name, num_heads=1, **model)
        if name == "chosen":
            known = json.loads((path / "config.json").read_text())
            (path / "config.json").write_text(json.dumps({**known, "pad_token_id": NEWLINE}))
    command = [sys.executable, "-W", "ignore", __file__, str(tmp_path)]
    done = subprocess.run(command, text=True, capture_output=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def compare(directory: Path) -> None:
    """Train one step, and score its samples with transformers alone."""
    import torch
    from transformers import AutoModelForSequenceClassification

    models = {name: {"path": str(directory / name), **SETTINGS[name]} for name in MODELS}
    result = train(config_of(directory, models))
    rows = list(metrics.read_trajectories(result.run_dir, 1))
    assert [row["status"] for row in rows] == ["ok"] * 8
    for name, model in models.items():
        conversations = Conversations(RewardModel(tokenizer="bytes", **model))
        classifier: Any = AutoModelForSequenceClassification.from_pretrained(model["path"], dtype=torch.float32)
        classifier.config.pad_token_id = conversations.pad_id
        for row in rows:
            messages = [*row["prompt"], {"role": "assistant", "content": row["completion"]}]
            ids = conversations.encode(messages)
            assert ids[-1] == NEWLINE
            with torch.no_grad():
                logits_L = classifier(input_ids=torch.tensor([ids])).logits[0]
            assert row["components"][name] == pytest.approx(conversations.score(logits_L.tolist()), abs=1e-4), name
        assert len({round(row["components"][name], 4) for row in rows}) > 4, "scores that differ"


if __name__ == "__main__":
    compare(Path(sys.argv[1]))
