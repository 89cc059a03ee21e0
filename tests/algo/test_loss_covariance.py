"""Selections see the whole mini-batch, once; losses that use them are the same under any split into micro-batches."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlcore.algo.covariance import SelectionInputs, clip_cov, kl_cov, select_clip_cov, select_kl_cov
from rlcore.algo.loss import PolicyLossOutput, cispo, gmpo, gpg, gspo, sapo
from rlcore.algo.step import weigh
from rlcore.config import AlgoConfig, EngineConfig, ImportanceConfig, ModelConfig
from rlcore.data.batch import micro_batches
from rlcore.engines.hf import TrainEngine
from rlcore.engines.hf.train.policy_loss import PolicyLoss
from rlcore.testing.tiny import random_batch, write_tiny_model
from rlcore.types import Batch, Metrics

torch.set_num_threads(1)

CONFIG = AlgoConfig(clip_cov_frac=0.3, clip_cov_low=-0.2, clip_cov_high=0.5, kl_cov_frac=0.25)


def selection_inputs(seed: int = 0, config: AlgoConfig = CONFIG) -> SelectionInputs:
    generator = torch.Generator().manual_seed(seed)
    mask_BT = torch.rand(5, 8, generator=generator) < 0.6
    return SelectionInputs(
        logprobs_BT=torch.randn(5, 8, generator=generator),
        advantages_BT=torch.randn(5, 1, generator=generator).expand(5, 8),
        mask_BT=mask_BT,
        seed=seed,
        config=config,
    )


def plain_covariances(inputs: SelectionInputs) -> dict[tuple[int, int], float]:
    places = [(b, t) for b in range(5) for t in range(8) if inputs.mask_BT[b, t]]
    logps = [inputs.logprobs_BT[place].item() for place in places]
    advantages = [inputs.advantages_BT[place].item() for place in places]
    means = sum(logps) / len(places), sum(advantages) / len(places)
    pairs = zip(places, logps, advantages, strict=True)
    return {place: (logp - means[0]) * (advantage - means[1]) for place, logp, advantage in pairs}


@pytest.mark.parametrize("seed", range(5))
def test_kl_cov_picks_the_share_of_tokens_with_the_highest_covariances(seed: int) -> None:
    inputs = selection_inputs(seed)
    covariances = plain_covariances(inputs)
    num = int(0.25 * len(covariances))
    expected = sorted(covariances, key=lambda place: -covariances[place])[:num]
    assert {tuple(number) for number in select_kl_cov(inputs).nonzero().tolist()} == set(expected)


@pytest.mark.parametrize("seed", range(5))
def test_clip_cov_draws_its_share_from_the_tokens_inside_the_bounds(seed: int) -> None:
    inputs = selection_inputs(seed)
    covariances = plain_covariances(inputs)
    inside = {place for place, covariance in covariances.items() if -0.2 < covariance < 0.5}
    chosen = {tuple(number) for number in select_clip_cov(inputs).nonzero().tolist()}
    assert chosen <= inside
    assert len(chosen) == min(len(inside), int(0.3 * len(covariances)))
    assert torch.equal(select_clip_cov(inputs), select_clip_cov(inputs))
    others = [select_clip_cov(replace(inputs, seed=other)) for other in range(10, 20)]
    assert any(not torch.equal(other, select_clip_cov(inputs)) for other in others)


@pytest.mark.parametrize("select", [select_clip_cov, select_kl_cov])
def test_at_least_one_token_is_picked_and_none_where_there_is_none(select: Callable[..., torch.Tensor]) -> None:
    tiny = replace(CONFIG, clip_cov_frac=1e-6, clip_cov_low=-100.0, clip_cov_high=100.0, kl_cov_frac=1e-6)
    inputs = selection_inputs(config=tiny)
    assert int(select(inputs).sum()) == 1
    assert not select(replace(inputs, mask_BT=torch.zeros(5, 8, dtype=torch.bool))).any()


def test_tokens_of_truncated_samples_that_have_no_loss_are_not_selected() -> None:
    batch = random_batch(num_groups=3)
    truncated_B = np.arange(len(batch)) % 2 == 0
    config = AlgoConfig(overlong="mask", kl_cov_frac=1.0)
    weighed = weigh(replace(batch, truncated_B=truncated_B), config, select_kl_cov)
    assert weighed.selected_BT is not None
    expected_BT = batch.tokens.loss_mask_BT & ~truncated_B[:, None]
    np.testing.assert_array_equal(weighed.selected_BT, expected_BT)
    assert weigh(batch, config).selected_BT is None


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "llama", num_key_value_heads=2)


def engine_of(path: Path, loss: Any, algo: AlgoConfig, micro_batch_tokens: int = 100_000) -> TrainEngine:
    config = EngineConfig(dtype="float64", micro_batch_tokens=micro_batch_tokens)
    return TrainEngine("causal_lm", ModelConfig(path=str(path)), config, PolicyLoss(loss, algo, sampler_differs=True))


def gradients_of(engine: TrainEngine, batch: Batch) -> tuple[list[torch.Tensor], Metrics]:
    seen: list[torch.Tensor] = []
    engine._optimizer.step = lambda lr: seen.extend(  # type: ignore[method-assign]
        parameter.grad.clone() for parameter in engine._optimizer.parameters if parameter.grad is not None
    )
    metrics = engine.update(batch)
    return seen, {name: value for name, value in metrics.items() if not name.startswith("time/")}


LOSSES: dict[Callable[..., PolicyLossOutput], Callable[..., torch.Tensor] | None] = {
    gspo: None,
    cispo: None,
    sapo: None,
    gpg: None,
    gmpo: None,
    clip_cov: select_clip_cov,
    kl_cov: select_kl_cov,
}


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES, ids=lambda function: function.__name__)
def test_any_split_into_micro_batches_gives_the_same_gradient_and_metrics(
    llama: Path, loss: Callable[..., PolicyLossOutput]
) -> None:
    """With the importance factor of whole sequences on, and tokens picked out of the whole mini-batch."""
    algo = replace(CONFIG, aggregation="seq_mean_token_mean", importance=ImportanceConfig(level="sequence", cap=1.5))
    batch = random_batch(num_groups=4, samples=2)
    rng = np.random.default_rng(5)
    old_BT = engine_of(llama, loss, algo).logprobs(batch)
    old_BT = (old_BT + 0.2 * rng.standard_normal(old_BT.shape)).astype(np.float32)
    mu_BT = (old_BT + 0.2 * rng.standard_normal(old_BT.shape)).astype(np.float32)
    tokens = replace(batch.tokens, rollout_logprobs_BT=mu_BT)
    batch = weigh(replace(batch, tokens=tokens, old_logprobs_BT=old_BT), algo, LOSSES[loss])
    if LOSSES[loss] is not None:
        assert batch.selected_BT is not None
        assert batch.selected_BT.any()
    expected, metrics = gradients_of(engine_of(llama, loss, algo), batch)
    assert 0.0 < metrics["policy/importance_capped_frac"] < 1.0
    longest = int(batch.lengths_B.max())
    for rows in (1, 3):
        budget = rows * longest
        assert len(micro_batches(batch.lengths_B, budget)) > 1
        gradients, split_metrics = gradients_of(engine_of(llama, loss, algo, budget), batch)
        for mine, theirs in zip(gradients, expected, strict=True):
            assert (mine - theirs).norm() <= 1e-9 * theirs.norm()
        assert split_metrics == pytest.approx(metrics, rel=1e-9)
