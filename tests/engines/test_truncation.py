"""Training on tokens drawn from a part of the vocabulary: what is recorded, what corrects for it, what is refused.

Letters: R drawn tokens, V vocabulary.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from rlcore.algo.importance import importance_factor, sampler_differs
from rlcore.config import ImportanceConfig
from rlcore.engines.hf.sample.sampling import RowSampling, draw
from rlcore.errors import ConfigError
from rlcore.plan import OldLogprobs
from rlcore.plugins.planning import plan_run
from rlcore.report import metrics
from rlcore.testing import write_prompts
from rlcore.testing.tiny import write_tiny_model
from rlcore.train import train
from rlcore.types import Sampling

NEEDED = (
    "model.path=none",
    "model.tokenizer=bytes",
    "data.sources.all.path=p.jsonl",
    "reward.functions.letters.fn=count_letter",
    "train.prompts_per_step=8",
    "rollout.temperature=0.6",
    "rollout.top_p=0.8",
)
NUM = 20_000
VOCABULARY = 20


def kept_tokens(probs_V: list[float], top_p: float) -> list[int]:
    """The most probable tokens up to the one with which their sum reaches top_p, by a plain loop."""
    kept, total = [], 0.0
    for token in sorted(range(len(probs_V)), key=lambda i: -probs_V[i]):
        if total < top_p:
            kept.append(token)
        total += probs_V[token]
    return kept


def test_at_temperature_0_6_and_top_p_0_8_the_mean_ratio_is_one_once_corrected_and_means_are_those_of_the_policy() -> (
    None
):
    logits_V = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(0))
    policy_V = torch.softmax(logits_V / 0.6, dim=-1).double()
    kept = kept_tokens(policy_V.tolist(), 0.8)
    mass = sum(float(policy_V[token]) for token in kept)
    assert 0.8 <= mass < 0.95
    settings = RowSampling.of([Sampling(temperature=0.6, top_p=0.8)] * NUM, VOCABULARY, torch.device("cpu"))
    uniforms_R = np.random.default_rng(1).random(NUM)
    token_R, recorded_R = draw(logits_V.expand(NUM, -1), settings, uniforms_R)
    assert set(token_R.tolist()) == set(kept)
    expected_R = (policy_V[token_R] / mass).log()
    torch.testing.assert_close(recorded_R.double(), expected_R, atol=1e-5, rtol=0.0)

    mask_1R = torch.ones((1, NUM), dtype=torch.bool)
    moved_V = torch.softmax(logits_V / 0.6 + torch.linspace(-0.5, 0.5, VOCABULARY), dim=-1).double()
    worth_V = torch.linspace(-1.0, 2.0, VOCABULARY).double()
    for policy, name in ((policy_V, "the policy that drew"), (moved_V, "another policy")):
        old_1R = policy[token_R].log()[None]
        factor_1R, found = importance_factor(old_1R, recorded_R[None].double(), mask_1R, ImportanceConfig(cap=10.0))
        share = sum(float(policy[token]) for token in kept)
        assert float(found["importance_mean"].mean()) / share == pytest.approx(1.0, abs=0.01), name
        truth = sum(float(policy[token] * worth_V[token]) for token in kept)
        assert float((factor_1R[0] * worth_V[token_R]).mean()) == pytest.approx(truth, abs=0.02), name
        if policy is policy_V:  # what the correction is for
            assert abs(float(worth_V[token_R].mean()) - truth) > 0.05


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        plan_run([], [*NEEDED, *overrides], ["null"])
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ((), ("rollout.top_p: found 0.8", "biased", "rollout.allow_truncation=true")),
        (("rollout.allow_truncation=true", "rollout.top_p=1.0"), ("has no effect", "nothing is truncated")),
        (
            ("rollout.allow_truncation=true", "schedule.old_logprobs=behaviour"),
            ("needs schedule.old_logprobs=recompute",),
        ),
        (("rollout.allow_truncation=true", "algo.importance.correction=none"), ("choose from: truncate, mask",)),
        (("rollout.allow_truncation=true", "algo.kl.placement=reward"), ("choose algo.kl.placement=loss",)),
    ],
)
def test_truncation_that_would_leave_the_ratio_biased_is_refused(
    overrides: tuple[str, ...], words: tuple[str, ...]
) -> None:
    message = refused(*overrides)
    assert all(word in message for word in words), message


@pytest.mark.parametrize("setting", ["rollout.top_p=0.8", "rollout.top_k=5", "rollout.min_p=0.1"])
def test_a_run_that_truncates_takes_a_pass_for_pi_old_and_corrects(setting: str) -> None:
    plan = plan_run([], [*NEEDED[:-1], setting, "rollout.allow_truncation=true", "actor.minibatch_prompts=0"], ["null"])
    assert plan.schedule.old_logprobs is OldLogprobs.PASS
    assert sampler_differs(plan.config)
    assert not sampler_differs(plan_run([], list(NEEDED[:-1]), ["null"]).config)


REWARDS = """
async def evens(trajectory):
    return float((trajectory.token_ids[trajectory.loss_mask] % 2 == 0).mean())
"""


@pytest.mark.fault
def test_a_run_at_temperature_0_6_and_top_p_0_8_has_a_mean_ratio_of_one_and_the_kept_mass_as_its_factor(
    tmp_path: Path,
) -> None:
    (tmp_path / "rewards.py").write_text(REWARDS)
    config = {
        "model": {"path": str(write_tiny_model(tmp_path / "tiny")), "tokenizer": "bytes"},
        "data": {"sources": {"train": {"path": str(write_prompts(tmp_path / "prompts.jsonl", 20, "{index}"))}}},
        "rollout": {
            "samples_per_prompt": 4,
            "max_tokens": 16,
            "temperature": 0.6,
            "top_p": 0.8,
            "allow_truncation": True,
        },
        "reward": {"functions": {"evens": {"fn": f"{tmp_path / 'rewards.py'}:evens"}}},
        "actor": {"minibatch_prompts": 2},
        "train": {"prompts_per_step": 4, "max_steps": 2, "dir": str(tmp_path / "runs"), "name": "run"},
        "checkpoint": {"every_steps": 0},
        "cluster": {"threads": 1},
    }
    rows = [row for row in metrics.read(train(config).run_dir) if "reward/mean" in row]
    assert len(rows) == 2
    for row in rows:
        assert row["policy/ratio_mean"] == pytest.approx(1.0, abs=0.01)
        assert 0.8 <= row["policy/importance_mean"] < 0.97
        assert row["policy/importance_max"] <= 1.0 + 1e-4
