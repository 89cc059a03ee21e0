"""A step whose samples were all dropped teaches nothing, whatever an estimator or a KL term would need of them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import rlcore
from rlcore.report import metrics
from rlcore.testing.runs import run_settings

pytestmark = pytest.mark.slow

REWARD = """
async def late(trajectory):
    if trajectory.versions[0][1] == 0:
        raise ValueError("the first step has no scores")
    return float(trajectory.token_ids[-1])
"""
REFERENCE = {"reference.backend": "null", "algo.kl.coef": 0.1}
CRITIC = {"algo.preset": "ppo", "critic.engine": "critic_engine", "plugins.critic_engine.backend": "null"}
RUNS: dict[str, dict[str, Any]] = {
    "a KL penalty in the reward": {**REFERENCE, "algo.kl.placement": "reward"},
    "a KL penalty in the advantage": {**REFERENCE, "algo.kl.placement": "advantage"},
    "values": CRITIC,
    "greedy baselines": {"algo.preset": "remax"},
    "entropies": {"algo.top_entropy_quantile": 0.5},
    "resampling": {"algo.dynamic_sampling": True, "algo.top_entropy_quantile": 0.5},
    "tokens that a loss selects": {"algo.policy_loss": "kl_cov"},
    "streamed mini-batches": {"algo.policy_loss": "clip_cov", "schedule.stream_minibatches": True},
    "recorded tokens": {"train.record_tokens": "all"},
}


@pytest.mark.parametrize("more", RUNS.values(), ids=RUNS)
def test_the_step_trains_nothing_and_the_next_one_trains(tmp_path: Path, more: dict[str, Any]) -> None:
    (tmp_path / "rewards.py").write_text(REWARD)
    settings = run_settings(
        tmp_path, 16, **{"train.name": "run", "reward.error_budget_frac": 1.0, "rollout.samples_per_prompt": 4, **more}
    )
    settings["reward.functions.letters.fn"] = f"{tmp_path / 'rewards.py'}:late"
    plugins = ["null", *(["critic_engine"] if "critic.engine" in more else [])]
    run_dir = rlcore.train(settings, plugins=plugins).run_dir
    first, second = ([row["advantage"] for row in metrics.read_trajectories(run_dir, step)] for step in (1, 2))
    assert set(first) == {None}
    arrays = load_file(run_dir / "tokens" / "step_000001.train.safetensors")
    assert len(arrays["advantage"]) == len(arrays["token_id"]) > 0
    assert np.isnan(arrays["advantage"]).all()
    assert None not in second
    assert any(second)
