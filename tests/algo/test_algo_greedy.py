"""Runs and plans of algorithms with needs: a greedy sample per prompt, tokens picked out of a mini-batch."""

import json
from pathlib import Path
from typing import Any

import pytest
from rlcore_view import read

from rlcore.algo.core_offers import OFFERS
from rlcore.contracts.offers import Algorithm, AlgorithmKind, Need, Scope
from rlcore.errors import ConfigError, PlanError, PluginError
from rlcore.plan.components import check_needs
from rlcore.plan.run_plan import AlgorithmPlan
from rlcore.plugins.planning import plan_run
from rlcore.report import metrics
from rlcore.testing import write_prompts
from rlcore.testing.tiny import write_tiny_model
from rlcore.train import train

REWARDS = """
async def different_tokens(trajectory):
    if trajectory.id.epoch < 0 and trajectory.prompt.id.endswith("/1"):
        raise RuntimeError("as asked")
    return float(len(set(trajectory.token_ids[trajectory.loss_mask].tolist())))
"""

TOKEN_REWARDS = """
import numpy as np
from rlcore.types import Reward

async def different_tokens(trajectory):
    num = len(set(trajectory.token_ids[trajectory.loss_mask].tolist()))
    scores = np.zeros(len(trajectory.token_ids), np.float32)
    scores[np.flatnonzero(trajectory.loss_mask)[0]] = num
    return Reward(0.0, token_scores=scores)
"""


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "rewards.py").write_text(REWARDS)
    return {
        "model": {"path": "", "tokenizer": "bytes"},
        "data": {"sources": {"train": {"path": str(write_prompts(tmp_path / "prompts.jsonl", 4))}}},
        "rollout": {"backend": "null", "samples_per_prompt": 2, "max_tokens": 6},
        "reward": {"functions": {"tokens": {"fn": f"{tmp_path / 'rewards.py'}:different_tokens"}}},
        "algo": {"preset": "remax"},
        "actor": {"backend": "null", "lr": 0.1},
        "train": {"prompts_per_step": 4, "max_steps": 2, "dir": str(tmp_path / "runs"), "name": "run"},
    }


@pytest.mark.slow
def test_a_greedy_sample_of_each_prompt_is_the_baseline_and_is_not_trained_on(config: dict[str, Any]) -> None:
    """A unigram repeats one token when it is greedy: it scores 1. One reward fails, and its prompt is left out."""
    result = train(config, plugins=["null"])
    steps = [row for row in metrics.read(result.run_dir) if "reward/mean" in row]
    assert [row["reward/greedy_mean"] for row in steps] == [1.0, 1.0]
    assert [row["data/greedy_failed"] for row in steps] == [1.0, 1.0]
    for step in (1, 2):
        path = result.run_dir / "trajectories" / f"step_{step:06}.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert len(rows) == 8
        trained = [row for row in rows if row["advantage"] is not None]
        assert len(trained) == 6
        assert all(row["advantage"] == row["score"] - 1.0 for row in trained)


@pytest.mark.slow
def test_token_scores_are_part_of_a_greedy_samples_reward(config: dict[str, Any], tmp_path: Path) -> None:
    """With all of the reward in token scores, the advantages are those of the same reward as a score."""
    (tmp_path / "rewards.py").write_text(TOKEN_REWARDS)
    config["train"]["max_steps"] = 1
    result = train(config, plugins=["null"])
    [step] = [row for row in metrics.read(result.run_dir) if "reward/mean" in row]
    assert (step["reward/mean"], step["reward/greedy_mean"]) == (0.0, 1.0)
    lines = (result.run_dir / "trajectories" / "step_000001.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert all(row["advantage"] == pytest.approx(row["token_score"] - 1.0) for row in rows)
    assert len({row["token_score"] for row in rows}) > 1
    assert step["reward/zero_std_frac"] < 1.0
    assert [sample.info["token_score"] for sample in read(result.run_dir).samples] == [
        row["token_score"] for row in rows
    ]


@pytest.mark.fault
def test_the_cov_losses_train_a_model_and_log_the_share_of_tokens_they_picked(
    config: dict[str, Any], tmp_path: Path
) -> None:
    config |= {"model": {"path": str(write_tiny_model(tmp_path / "tiny")), "tokenizer": "bytes"}}
    config |= {"actor": {"lr": 0.001, "minibatch_prompts": 2}, "algo": {"policy_loss": "kl_cov", "kl_cov_frac": 0.25}}
    config["rollout"]["backend"] = "hf"
    config["train"]["max_steps"] = 1
    result = train(config)
    [row] = [row for row in metrics.read(result.run_dir) if "policy/selected" in row]
    assert 0.15 < row["policy/selected"] <= 0.25


def test_a_greedy_baseline_is_refused_where_a_step_has_no_moment_for_it(config: dict[str, Any]) -> None:
    for setting in ("schedule.stream_minibatches=true", "schedule.max_staleness=1"):
        with pytest.raises(PlanError, match=r"algo\.advantage=remax .* needs a greedy sample of each prompt"):
            plan_run([config], [setting], ["null"])


def test_k_of_pass_at_k_is_less_than_the_group(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"algo\.pass_k: found 4; needs less than rollout\.samples_per_prompt=2"):
        plan_run([config], ["algo.advantage=pass_at_k"], ["null"])
    made = plan_run([config], ["algo.advantage=pass_at_k", "algo.pass_k=1"], ["null"])
    assert made.algorithms["advantage"].algorithm.name == "pass_at_k"


@pytest.mark.parametrize(("needs", "selection"), [({Need.MINIBATCH_STATISTICS}, ""), (set(), "mine:pick")])
def test_a_loss_that_selects_names_its_selection_and_says_so(
    config: dict[str, Any], needs: set[Need], selection: str
) -> None:
    kind = AlgorithmKind.POLICY_LOSS
    algorithm = Algorithm("mine", kind, "mine:loss", Scope.SAMPLE, frozenset(needs), selection=selection)
    with pytest.raises(
        PluginError, match=r"algo\.policy_loss=mine of me: found .* if and only if it names a selection"
    ):
        check_needs(plan_run([config], [], ["null"]).config, {"policy_loss": AlgorithmPlan(algorithm, "me")})


@pytest.mark.parametrize(
    ("name", "key"),
    [("sapo", "sapo_tau_positive"), ("clip_cov", "clip_cov_frac"), ("kl_cov", "kl_cov_coef")],
)
def test_a_setting_of_a_loss_that_is_not_chosen_has_no_effect_and_is_refused(
    config: dict[str, Any], name: str, key: str
) -> None:
    with pytest.raises(
        ConfigError, match=rf"algo\.{key}: .* has no effect: it is used only when algo\.policy_loss == '{name}'"
    ):
        plan_run([config], [f"algo.{key}=0.5"], ["null"])
    plan_run([config], [f"algo.{key}=0.5", f"algo.policy_loss={name}"], ["null"])


@pytest.mark.parametrize(("name", "key"), [("gpg", "clip_low"), ("sapo", "clip_high"), ("gmpo", "dual_clip")])
def test_a_bound_that_the_chosen_loss_does_not_have_is_refused(config: dict[str, Any], name: str, key: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"algo\.{key}: .* it is used only when algo\.policy_loss not in \(.*'{name}'"
    ):
        plan_run([config], [f"algo.{key}=0.5", f"algo.policy_loss={name}"], ["null"])


def test_every_offered_algorithm_is_accepted_but_those_that_need_a_critic_without_one(config: dict[str, Any]) -> None:
    plain = plan_run([config], [], ["null"]).config
    refused = set()
    for offer in OFFERS:
        try:
            check_needs(plain, {offer.kind.value: AlgorithmPlan(offer, "core")})
        except ConfigError:
            refused.add(offer.name)
    assert refused == {offer.name for offer in OFFERS if Need.VALUES in offer.needs}
    assert refused
