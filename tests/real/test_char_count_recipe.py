"""The script of the example char_count, from data to curves, on a tiny model with the tokenizer of SmolLM2."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlcore.testing.tiny import write_tiny_model

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
MODEL = Path(os.environ.get("RLCORE_SMOLLM2") or ROOT / ".models" / "smollm2-135m-instruct")


def test_warm_up_grpo_and_ppo_follow_each_other_and_their_curves_are_written(tmp_path: Path) -> None:
    if not MODEL.is_dir():
        pytest.skip(f"no model at {MODEL}: python examples/arithmetic/get_model.py {MODEL}")
    tiny = write_tiny_model(tmp_path / "tiny", vocab_size=49152, bos_token_id=1, eos_token_id=2, pad_token_id=2)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(MODEL / name, tiny / name)
    command = [sys.executable, str(ROOT / "examples" / "char_count" / "run.py"), "--model", str(tiny)]
    command += ["--dir", str(tmp_path / "runs"), "--out", str(tmp_path / "result"), "--sft-updates", "2"]
    command += ["train.max_steps=2", "train.prompts_per_step=2", "rollout.samples_per_prompt=2", "rollout.max_tokens=4"]
    command += ["actor.minibatch_prompts=1", "eval.sources.heldout.limit=2"]
    for _ in range(2):  # the second time everything is there
        done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr
    assert "update 1/2" not in done.stderr
    record = json.loads((tmp_path / "result.json").read_text())
    assert len(record["sft"]["losses"]) == 2
    assert {name: [sorted(map(int, run["curve"])) for run in runs] for name, runs in record["runs"].items()} == {
        "grpo": [[0, 2]],
        "ppo": [[0, 2]],
    }
    for name in record["runs"]:
        settings = json.loads((tmp_path / "runs" / f"small_{name}_0" / "done.json").read_text())
        assert ("algo.preset=ppo" in settings) is (name == "ppo")
    assert "| step | GRPO | PPO |" in (tmp_path / "result.md").read_text()
