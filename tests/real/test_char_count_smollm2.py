"""The example char_count on SmolLM2: warm-up, then GRPO from what it wrote; that it runs, not how well it learns."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
MODEL = Path(os.environ.get("RLCORE_SMOLLM2") or ROOT / ".models" / "smollm2-135m-instruct")
EXAMPLE = ROOT / "examples" / "char_count"


def printed(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_the_warm_up_writes_a_model_that_grpo_continues_from(tmp_path: Path) -> None:
    if not MODEL.is_dir():
        pytest.skip(f"no model at {MODEL}: python examples/arithmetic/get_model.py {MODEL}")
    sft = ("--batch", "8", "--lr", "1e-4", "--max-updates", "3")
    output = printed(str(EXAMPLE / "sft.py"), str(MODEL), str(EXAMPLE / "sample"), str(tmp_path / "sft"), *sft)
    losses = [float(text) for text in re.findall(r"loss (\S+)", output)]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    output = printed(
        *("-m", "rlcore", "train", str(EXAMPLE / "config.yaml"), str(EXAMPLE / "small.yaml")),
        *(f"model.path={tmp_path / 'sft' / 'model'}", f"data.sources.train.path={EXAMPLE / 'sample' / 'train.jsonl'}"),
        *(f"eval.sources.heldout.path={EXAMPLE / 'sample' / 'heldout.jsonl'}", "eval.at_start=false"),
        *("train.max_steps=2", "train.prompts_per_step=2", "rollout.samples_per_prompt=2", "rollout.max_tokens=24"),
        *("actor.minibatch_prompts=1", f"train.dir={tmp_path}", "train.name=run"),
    )
    assert "trained 2 steps" in output
    assert (tmp_path / "run" / "checkpoints" / "step_2" / "model").is_dir()
