"""Scalar reward models on vLLM: what is said of models that are none, and the same scores as on transformers.

What starts an engine runs with the Python of .venv-vllm (`make vllm`).
"""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rlcore_reward_loop.models.conversations import activated, check_head, check_outputs, serves_scores, until_padding
from rlcore_reward_loop.settings import ModelSettings
from safetensors.numpy import save_file

from rlcore.errors import ConfigError
from rlcore.report import metrics
from rlcore.testing import write_prompts
from rlcore.testing.marks import NEEDS_VLLM
from rlcore.testing.tiny import write_tiny_classifier, write_tiny_model
from rlcore.train import train

ON_VLLM = (
    pytest.mark.real,
    pytest.mark.timeout(240),
    NEEDS_VLLM,
)
NEWLINE = 10
"""The last byte of every conversation without a chat template."""
MODELS: dict[str, dict[str, Any]] = {
    "scalar": {"architecture": "Llama", "labels": 1},
    "chosen": {"architecture": "Qwen2", "labels": 3},
}
SETTINGS: dict[str, dict[str, Any]] = {"scalar": {}, "chosen": {"label": 2, "activation": "softmax"}}


def test_the_score_is_one_output_after_the_activation() -> None:
    logits = [math.log(1.0), math.log(3.0), math.log(4.0)]
    assert activated(logits, ModelSettings(label=1)) == pytest.approx(math.log(3.0))
    assert activated(logits, ModelSettings(label=1, activation="sigmoid")) == pytest.approx(0.75)
    assert activated(logits, ModelSettings(label=2, activation="softmax")) == pytest.approx(0.5)
    assert activated([-1000.0], ModelSettings(activation="sigmoid")) == 0.0
    assert activated([1000.0, 1000.0], ModelSettings(activation="softmax")) == pytest.approx(0.5)


def test_a_conversation_is_scored_at_its_last_token_that_is_no_padding() -> None:
    assert until_padding([5, 7, 5, 7, 7], 7) == [5, 7, 5]
    assert until_padding([5, 7], None) == [5, 7]
    assert until_padding([7, 7], 7) == [7]


def test_an_output_that_the_model_lacks_is_named() -> None:
    with pytest.raises(ConfigError, match=r"reward model 'm': label=1, but it has 1 outputs"):
        check_outputs(ModelSettings(path="m", label=1), 1)
    with pytest.raises(ConfigError, match=r"softmax of its one output is always 1; needs sigmoid"):
        check_outputs(ModelSettings(path="m", activation="softmax"), 1)


def test_a_model_of_the_other_sort_than_its_reward_needs_is_named_with_the_way_out() -> None:
    assert serves_scores("m", ["Qwen2ForSequenceClassification"], {"model"})
    assert not serves_scores("m", ["Qwen2ForCausalLM"], {"judge"})
    assert serves_scores("m", ["Qwen2ForSequenceClassification"], ()), "asked over the endpoint only"
    with pytest.raises(ConfigError, match=r"'m': it is Qwen2ForCausalLM, which has no score head; .* or kind=judge"):
        serves_scores("m", ["Qwen2ForCausalLM"], {"model"})
    with pytest.raises(
        ConfigError, match=r"'m': it is LlamaForSequenceClassification, which gives numbers, .*kind=mod"
    ):
        serves_scores("m", ["LlamaForSequenceClassification"], {"judge"})


@pytest.mark.parametrize("sharded", [False, True])
def test_files_without_the_weights_of_a_head_are_refused(tmp_path: Path, sharded: bool) -> None:
    check_head(str(tmp_path / "a hub name"))
    for head in ("lm_head.weight", "score.weight"):
        names = ["model.embed_tokens.weight", head]
        if sharded:
            index = {"weight_map": dict.fromkeys(names, "model-00001-of-00002.safetensors")}
            (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        else:
            save_file({name: np.zeros(2, np.float32) for name in names}, tmp_path / "model.safetensors")
        if head.startswith("score."):
            check_head(str(tmp_path))
        else:
            with pytest.raises(ConfigError, match=r"no weight 'score\.weight', so its scores would be random"):
                check_head(str(tmp_path))


def config_of(directory: Path, models: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A run of one step whose samples are judged by each of these models."""
    return {
        "model": {"path": "", "tokenizer": "bytes"},
        "data": {"sources": {"train": {"path": str(write_prompts(directory / "prompts.jsonl", 8))}}},
        "rollout": {"backend": "null", "samples_per_prompt": 4, "max_tokens": 24},
        "actor": {"backend": "null"},
        "train": {"prompts_per_step": 2, "max_steps": 1, "dir": str(directory), "name": "run"},
        "plugins": {
            "null": {},
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


@pytest.mark.real
def test_on_transformers_too_a_model_without_a_head_is_refused(tmp_path: Path) -> None:
    from rlcore_reward_loop.models.classifier import Classifier

    path = str(write_tiny_model(tmp_path / "policy"))
    with pytest.raises(ConfigError, match=r"'.*policy': its files have no weight 'score\.weight'"):
        Classifier(ModelSettings(path=path, tokenizer="bytes"), "cpu", 1)


def on_vllm(function: Any) -> Any:
    """Mark a test as one that starts an engine."""
    for mark in ON_VLLM:
        function = mark(function)
    return function


@on_vllm
def test_every_score_of_a_run_on_vllm_is_the_one_of_transformers(tmp_path: Path) -> None:
    """In a process of its own, for vLLM warns; also where a conversation ends in the model's padding token."""
    for name, model in MODELS.items():
        path = write_tiny_classifier(tmp_path / name, num_heads=1, **model)
        if name == "chosen":
            known = json.loads((path / "config.json").read_text())
            (path / "config.json").write_text(json.dumps({**known, "pad_token_id": NEWLINE}))
    command = [sys.executable, "-W", "ignore", __file__, str(tmp_path)]
    done = subprocess.run(command, text=True, capture_output=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def compare(directory: Path) -> None:
    """Train one step, and score what it sampled with the replica of transformers."""
    from rlcore_reward_loop.models.classifier import Classifier

    models = {name: {"path": str(directory / name), **SETTINGS[name]} for name in MODELS}
    result = train(config_of(directory, models))
    rows = list(metrics.read_trajectories(result.run_dir, 1))
    assert [row["status"] for row in rows] == ["ok"] * 8
    for name, model in models.items():
        classifier = Classifier(ModelSettings(tokenizer="bytes", **model), "cpu", 1)
        for row in rows:
            said = [*row["prompt"], {"role": "assistant", "content": row["completion"]}]
            ids = classifier.conversations.encode(said)
            assert ids[-1] == NEWLINE
            [expected] = classifier.scores([ids])
            assert row["components"][name] == pytest.approx(expected, abs=1e-4), name
        assert len({round(row["components"][name], 4) for row in rows}) > 4, "scores that differ"


if __name__ == "__main__":
    compare(Path(sys.argv[1]))
