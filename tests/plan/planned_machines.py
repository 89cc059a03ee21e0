"""Plans for machines that are not here; the tests of `rlcore plan --on` share them."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlcore.cli import main
from rlcore.testing import write_prompts

GIB = 2**30
QWEN_7B = {
    "model_type": "qwen2",
    "num_hidden_layers": 28,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
"""Of Qwen2.5-7B."""
QWEN_14B = QWEN_7B | {
    "num_hidden_layers": 48,
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
}
QWEN_32B = QWEN_14B | {"num_hidden_layers": 64, "intermediate_size": 27648}
"""Of Qwen2.5-32B."""


def settings_of_7b(tmp_path: Path) -> list[str]:
    """A run of long responses with a model of that shape, whose configuration is in `tmp_path / "model"`."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(QWEN_7B))
    return [
        f"model.path={tmp_path / 'model'}",
        "model.tokenizer=bytes",
        f"data.sources.all.path={write_prompts(tmp_path / 'prompts.jsonl', 64, '{index}')}",
        "reward.functions.exact_match.fn=exact_match",
        "data.max_prompt_tokens=1024",
        "rollout.max_tokens=8192",
        "rollout.samples_per_prompt=16",
        "train.prompts_per_step=64",
    ]


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", "--json", *arguments]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments]) == 2
    line = capsys.readouterr().err.strip()
    assert "\n" not in line
    return line
