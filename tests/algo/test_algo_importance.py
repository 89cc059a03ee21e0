"""Truncated and masked importance sampling against a plain loop, and what it is there for: unbiased means."""

import math
from dataclasses import replace
from itertools import product
from typing import Literal

import numpy as np
import pytest
import torch

from rlcore.algo.importance import importance_factor, sampler_differs
from rlcore.algo.loss import clip
from rlcore.config import AlgoConfig, EngineConfig, ImportanceConfig, RolloutConfig, RunConfig, ScheduleConfig
from rlcore.engines.hf import Predictions
from rlcore.engines.hf.train.microbatch import MicroBatch
from rlcore.engines.hf.train.policy_loss import PolicyLoss
from rlcore.testing.tiny import random_batch


def plain_factors(log_rhos: list[float], config: ImportanceConfig) -> list[float]:
    """The factor of each loss token of one row."""
    if config.level == "sequence":
        log_rhos = [math.fsum(log_rhos)] * len(log_rhos)
    rhos = [math.exp(rho) for rho in log_rhos]
    if config.correction == "none":
        return [1.0] * len(rhos)
    if config.correction == "truncate":
        return [min(rho, config.cap) for rho in rhos]
    return [rho if config.floor <= rho <= config.cap else 0.0 for rho in rhos]


@pytest.mark.parametrize(("correction", "level"), list(product(["truncate", "mask", "none"], ["token", "sequence"])))
@pytest.mark.parametrize("seed", range(3))
def test_factors_agree_with_a_plain_loop(correction: str, level: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    old_BT, mu_BT = (torch.randn(4, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    mask_BT = torch.rand(4, 6, generator=generator) < 0.6
    mu_BT[~mask_BT] = float("-inf")
    config = ImportanceConfig(correction=correction, level=level, cap=1.5, floor=0.5)  # type: ignore[arg-type]
    factor_BT, metrics = importance_factor(old_BT.requires_grad_(True), mu_BT, mask_BT, config)
    assert not factor_BT.requires_grad
    capped = 0
    for row in range(4):
        log_rhos = (old_BT - mu_BT)[row][mask_BT[row]].tolist()
        expected = plain_factors(log_rhos, config)
        assert factor_BT[row][mask_BT[row]].tolist() == pytest.approx(expected, abs=1e-12)
        assert not factor_BT[row][~mask_BT[row]].any()
        rhos = plain_factors(log_rhos, ImportanceConfig(level=config.level, cap=math.inf))
        assert metrics["importance_mean"][row][mask_BT[row]].tolist() == pytest.approx(rhos)
        if correction != "none":  # it has no bounds
            capped += sum(mine != pytest.approx(rho) for mine, rho in zip(expected, rhos, strict=True))
    assert int(metrics["importance_capped_frac"].sum()) == capped
    assert (capped > 0) is (correction != "none")


def test_by_hand() -> None:
    old_BT, mask_BT = torch.zeros(1, 3), torch.ones(1, 3) > 0
    mu_BT = -torch.tensor([[4.0, 1.0, 0.25]]).log()  # rho is 4, 1, 1/4, and of the sequence 1
    assert importance_factor(old_BT, mu_BT, mask_BT, ImportanceConfig())[0].tolist() == [[2.0, 1.0, 0.25]]
    masked = ImportanceConfig(correction="mask", floor=0.5)
    assert importance_factor(old_BT, mu_BT, mask_BT, masked)[0].tolist() == [[0.0, 1.0, 0.0]]
    whole = ImportanceConfig(level="sequence")
    assert importance_factor(old_BT, mu_BT, mask_BT, whole)[0][0].tolist() == pytest.approx([1.0] * 3)


def test_equal_policies_have_a_factor_of_exactly_one() -> None:
    logprobs_BT = -torch.rand(3, 5)
    corrections: tuple[Literal["truncate", "mask", "none"], ...] = ("truncate", "mask", "none")
    for correction in corrections:
        config = ImportanceConfig(correction=correction, level="sequence")
        factor_BT, metrics = importance_factor(logprobs_BT, logprobs_BT.clone(), logprobs_BT < 0, config)
        assert torch.equal(factor_BT, torch.ones(3, 5))
        assert not metrics["importance_capped_frac"].any()


def test_the_mean_factor_of_tokens_that_another_policy_drew_is_one() -> None:
    """And the corrected mean of any function is that under pi_old: here of the token's number."""
    rng = np.random.default_rng(0)
    pi_V, mu_V = rng.dirichlet(np.ones(8) * 5, size=2)
    drawn_N = torch.from_numpy(rng.choice(8, 200_000, p=mu_V))[None]
    logs = [torch.from_numpy(np.log(tensor))[drawn_N] for tensor in (pi_V, mu_V)]
    factor_BT, metrics = importance_factor(logs[0], logs[1], drawn_N >= 0, ImportanceConfig(cap=1000.0))
    assert float(metrics["importance_mean"].mean()) == pytest.approx(1.0, abs=0.01)
    assert float((factor_BT * drawn_N).mean()) == pytest.approx(float((pi_V * np.arange(8)).sum()), rel=0.01)
    assert float(drawn_N.double().mean()) != pytest.approx(float((pi_V * np.arange(8)).sum()), rel=0.01)


def test_the_policy_loss_is_multiplied_only_where_the_sampler_differs() -> None:
    """And entropy and KL are not: without an advantage nothing of the factor is left."""
    batch = random_batch()
    micro = MicroBatch(batch, torch.device("cpu"))
    logprobs_BT = torch.where(micro.mask_BT, -torch.rand(micro.mask_BT.shape), 0.0)
    predictions = Predictions(logprobs_BT, torch.ones_like(logprobs_BT))
    algo = AlgoConfig(entropy_coef=0.5)
    same, differs = (PolicyLoss(clip, algo, sampler_differs=flag)(micro, predictions) for flag in (False, True))
    assert not any("importance" in name for name in same.metrics)
    mu_BT = torch.tensor(batch.tokens.rollout_logprobs_BT)
    factor_BT = torch.where(micro.mask_BT, (logprobs_BT - mu_BT).exp().clamp(max=2.0), 0.0)
    torch.testing.assert_close(differs.loss_BT + 0.5, (same.loss_BT + 0.5) * factor_BT)
    assert {name for name in differs.metrics if "importance" in name} == {
        "policy/importance_mean",
        "policy/importance_max",
        "policy/importance_capped_frac",
    }


def test_the_sampler_differs_when_it_is_another_engine_or_behind_or_in_half_precision_and_pi_old_is_not_mu() -> None:
    elsewhere, behind = RolloutConfig(backend="another"), ScheduleConfig(max_staleness=1)
    assert not sampler_differs(RunConfig())
    assert not sampler_differs(RunConfig(schedule=ScheduleConfig(stream_minibatches=True)))
    for dtype in ("float32", "float64", "bfloat16", "float16"):
        half = RunConfig(actor=EngineConfig(dtype=dtype))  # type: ignore[arg-type]
        assert sampler_differs(half) is (dtype in ("bfloat16", "float16")), dtype
    assert sampler_differs(RunConfig(rollout=elsewhere))
    assert sampler_differs(RunConfig(schedule=behind))
    assert not sampler_differs(RunConfig(rollout=elsewhere, schedule=replace(behind, old_logprobs="behaviour")))
