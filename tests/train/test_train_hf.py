"""Whole runs on the hf backend with a tiny random transformers model."""

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlcore.errors import ConfigError, RewardError
from rlcore.plugins.planning import plan_run
from rlcore.report import metrics
from rlcore.testing import write_prompts
from rlcore.testing.runs import differing
from rlcore.testing.tiny import write_tiny_model
from rlcore.train import TrainResult, run_evaluation, train

pytestmark = pytest.mark.usefixtures("rewards_in_process")

REWARDS = '''
async def vowels(trajectory):
    return sum(letter in "aeiou" for letter in trajectory.text()) / 12

class StopsOnce:
    """Raises in its n-th call, unless the mark exists."""
    def __init__(self, mark, calls):
        self.mark, self.left = mark, calls

    async def score(self, trajectory):
        import pathlib
        self.left -= 1
        mark = pathlib.Path(self.mark)
        if self.left <= 0 and not mark.exists():
            mark.touch()
            raise RuntimeError("as asked")
        return 0.0
'''


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "rewards.py").write_text(REWARDS)
    return {
        "model": {"path": str(write_tiny_model(tmp_path / "tiny")), "tokenizer": "bytes"},
        "data": {"sources": {"train": {"path": str(write_prompts(tmp_path / "prompts.jsonl", 20, "{index}"))}}},
        "eval": {"sources": {"heldout": {"path": str(write_prompts(tmp_path / "heldout.jsonl", 2, "held {index}"))}}},
        "rollout": {"samples_per_prompt": 3, "max_tokens": 12},
        "reward": {"functions": {"vowels": {"fn": f"{tmp_path / 'rewards.py'}:vowels"}}},
        "actor": {"lr": 0.003, "minibatch_prompts": 2, "micro_batch_tokens": 200},
        "train": {"prompts_per_step": 4, "max_steps": 4, "dir": str(tmp_path / "runs"), "name": "run"},
        "checkpoint": {"every_steps": 2},
        "cluster": {"threads": 1},
    }


def stir() -> None:
    """Give this process the random states of another one."""
    random.seed()
    np.random.seed()
    torch.seed()


def step_rows(result: TrainResult) -> list[dict[str, float]]:
    return [row for row in metrics.read(result.run_dir) if "reward/mean" in row]


VARIANTS = {
    "plain": (),
    "schedule": ("actor.lr_schedule=cosine", "actor.warmup_steps=2", "actor.epochs=2"),
    "kl in the reward": ("algo.kl.placement=reward", "algo.kl.controller=adaptive", "algo.preset=reinforce_pp"),
    "lora": ("actor.lora.enabled=true", "actor.lora.rank=2", "algo.kl.placement=loss"),
    "bfloat16": ("actor.dtype=bfloat16",),
    "float16": ("actor.dtype=float16",),
}


@pytest.mark.fault
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_resumed_run_equals_one_that_was_never_interrupted(
    config: dict[str, Any], tmp_path: Path, variant: str
) -> None:
    mark = tmp_path / "mark"
    stops = {"fn": f"{tmp_path / 'rewards.py'}:StopsOnce", "kwargs": {"mark": str(mark), "calls": 36}}
    config["reward"]["functions"]["stops"] = {**stops, "on_failure": "abort", "weight": 0.0}
    stir()
    mark.touch()
    whole = train(config, *VARIANTS[variant]).run_dir
    mark.unlink()
    stir()
    with pytest.raises(RewardError, match="as asked"):
        train(config, "train.name=broken", *VARIANTS[variant])
    assert [row["step"] for row in metrics.read(tmp_path / "runs" / "broken")][-1] == 2, "stopped in the third step"
    stir()
    result = train(config, "train.name=broken", *VARIANTS[variant], resume=True)
    assert result.steps == 4
    assert differing(whole, result.run_dir) == []


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(4, 1), (1, 4)])
def test_a_resume_with_other_updates_per_step_continues_the_schedule_where_the_run_is(
    config: dict[str, Any], before: int, after: int
) -> None:
    falling = ("actor.lr_schedule=linear", "actor.lr=0.008", "actor.minibatch_prompts=0", "algo.entropy_coef=1e-9")
    half = train(config, *falling, f"actor.epochs={before}", stop_when=lambda step, _: step == 2)
    assert half.steps == 2
    result = train(config, *falling, f"actor.epochs={after}", resume=True)
    of_steps = [
        [0.008 * (1 - (step + part / num) / 4) for part in range(num)]
        for step, num in enumerate((before, before, after, after))
    ]
    assert [row["actor/lr"] for row in step_rows(result)] == pytest.approx([np.mean(rates) for rates in of_steps])


@pytest.mark.slow
def test_the_metrics_of_an_update_are_those_the_documentation_names(config: dict[str, Any]) -> None:
    rows = step_rows(train(config, "algo.kl.placement=loss", "algo.entropy_coef=0.01", "actor.lr=1e-9"))
    needed = {"policy/loss", "policy/entropy", "policy/kl", "policy/clip_frac_low", "policy/clip_frac_high"}
    assert needed | {"policy/ratio_max", "actor/grad_norm", "actor/lr", "actor/skipped"} <= rows[0].keys()
    assert rows[0]["policy/kl"] == pytest.approx(0.0, abs=1e-4)
    assert "actor/rows_skipped_frac" not in rows[0]


@pytest.mark.slow
def test_rows_of_groups_with_equal_rewards_are_left_out_of_updates(config: dict[str, Any], tmp_path: Path) -> None:
    """Every other prompt has a reward that is the same for all its samples: half of the rows teach nothing."""
    (tmp_path / "rewards.py").write_text(
        "def vowels(trajectory):\n"
        "    return trajectory.id.sample**2.0 if int(trajectory.prompt.messages[-1]['content'][-1]) % 2 else 1.0\n"
    )
    rows = step_rows(train(config, "train.max_steps=2", "actor.minibatch_prompts=4", "data.shuffle=false"))
    assert [row["actor/rows_skipped_frac"] for row in rows] == [0.5] * 2
    assert all(row["actor/grad_norm"] > 0 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "low", "high"), [("float32", 0.0, 1e-4), ("bfloat16", 1e-4, 0.2), ("float16", 1e-5, 0.02)]
)
def test_how_far_sampler_and_trainer_differ_is_logged_of_the_embedded_sampler_too(
    config: dict[str, Any], dtype: str, low: float, high: float
) -> None:
    # So that the first update of a step has tokens, whatever the rewards are; and computed as the sampler does not.
    differently = ("algo.entropy_coef=1e-9", "actor.shared_prefix=none")
    rows = step_rows(train(config, "train.max_steps=2", f"actor.dtype={dtype}", "actor.lr=1e-2", *differently))
    assert all(low <= row["policy/rollout_logprob_diff"] < high for row in rows), "not of updates after the first"
    assert all(("policy/importance_mean" in row) is (dtype != "float32") for row in rows)


@pytest.mark.slow
def test_with_two_minibatches_the_recorded_logprobs_serve_as_those_of_the_old_policy(config: dict[str, Any]) -> None:
    result = train(config, "train.max_steps=1", "actor.lr=1e-9")
    assert step_rows(result)[0]["policy/ratio_max"] == pytest.approx(1.0, abs=1e-3)


@pytest.mark.fault
@pytest.mark.parametrize("preset", ["grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp"])
def test_every_preset_without_a_critic_trains(config: dict[str, Any], preset: str) -> None:
    more = ("algo.overlong_buffer=4",) if preset == "dapo" else ()
    rows = step_rows(train(config, f"algo.preset={preset}", "train.max_steps=2", *more))
    assert len(rows) == 2
    assert all(np.isfinite(row["policy/loss"]) and row["actor/grad_norm"] > 0 for row in rows)


@pytest.mark.slow
def test_the_documented_code_reads_the_optimizers_state_of_a_checkpoint(config: dict[str, Any]) -> None:
    checkpoint = train(config, "train.max_steps=1").checkpoint
    page = (Path(__file__).parents[2] / "docs" / "run-directory.md").read_text("utf-8")
    [code] = re.findall(r"^```python\n(import json\nimport warnings\n.*?)^```$", page, re.MULTILINE | re.DOTALL)
    found: dict[str, Any] = {}
    exec(code.replace("runs/sums/checkpoints/step_12", str(checkpoint)), found)  # warnings are errors
    assert found["state"]
    assert all(name.startswith("optimizer.") for name in found["state"])


@pytest.mark.slow
def test_a_checkpoint_is_evaluated_with_its_weights(config: dict[str, Any]) -> None:
    result = train(config)
    step, expected = result.evaluations[-1]
    assert step == 4
    config["train"]["name"] = "other"
    plan = plan_run([config], [], [])
    assert run_evaluation(plan, result.run_dir) == expected
    assert run_evaluation(plan, None) == result.evaluations[0][1]


@pytest.mark.slow
def test_a_checkpoint_opens_with_transformers(config: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    result = train(config, "train.max_steps=1")
    assert result.checkpoint is not None
    model = AutoModelForCausalLM.from_pretrained(result.checkpoint / "model")
    assert model.config.vocab_size == 264


@pytest.mark.slow
def test_a_prompt_that_leaves_no_room_for_a_response_is_an_error_with_the_numbers(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"prompt 'train/\d+' has \d+ tokens, .*window holds 256; lower rollout\.max"):
        train(config, "rollout.max_tokens=250")
    with pytest.raises(ConfigError, match=r"prompt 'heldout/0' has .*; lower eval\.max_tokens to 2\d\d, or data"):
        train(config, "eval.max_tokens=250")
