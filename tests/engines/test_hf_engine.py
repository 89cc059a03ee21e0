"""The training engine: one optimizer step, exact under any split, and nothing on a gradient that is not finite."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlcore.algo.loss import clip
from rlcore.config import AlgoConfig, EngineConfig, KlConfig, ModelConfig
from rlcore.data.batch import micro_batches, select
from rlcore.engines.hf import LossTerms, MicroBatch, Predictions, TrainEngine
from rlcore.engines.hf.train.optimizer import learning_rate
from rlcore.engines.hf.train.policy_loss import PolicyLoss
from rlcore.errors import ConfigError, WorkerError
from rlcore.testing.runs import untimed
from rlcore.testing.tiny import random_batch, write_tiny_model
from rlcore.types import Batch, Float32s, Metrics

torch.set_num_threads(1)  # the models are tiny, and the tests may share their cores

ALL_TOKENS = 100_000


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "llama", num_key_value_heads=2)


def engine_of(
    path: Path, algo: AlgoConfig | None = None, *, kind: str = "causal_lm", loss: Any = None, **settings: Any
) -> TrainEngine:
    temperature = settings.pop("temperature", 1.0)
    config = EngineConfig(**{"dtype": "float64", "lr": 1e-3, "micro_batch_tokens": ALL_TOKENS, **settings})
    loss = loss or PolicyLoss(clip, algo or AlgoConfig())
    return TrainEngine(kind, ModelConfig(path=str(path)), config, loss, temperature=temperature)


def weights_of(engine: TrainEngine) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in engine.model.parameters()]


def gradients_of(engine: TrainEngine, batch: Batch) -> tuple[list[Tensor], Metrics]:
    """The gradients an update would use, seen from plain gradient descent: lr 1, no momentum, no clipping."""
    seen: list[Tensor] = []
    engine._optimizer.step = lambda lr: seen.extend(  # type: ignore[method-assign]
        parameter.grad.clone() for parameter in engine._optimizer.parameters if parameter.grad is not None
    )
    metrics = engine.update(batch)
    return seen, metrics


def policy_batch(engine: TrainEngine, seed: int = 0, **extra: Any) -> Batch:
    """A batch whose old and reference log-probs differ a little from the engine's own."""
    batch = random_batch(seed=seed, **extra)
    rng = np.random.default_rng(seed + 7)
    current_BT = engine.logprobs(batch)
    old_BT, reference_BT = (
        (current_BT + 0.3 * rng.standard_normal(current_BT.shape)).astype(np.float32) for _ in range(2)
    )
    return replace(batch, old_logprobs_BT=old_BT, reference_logprobs_BT=reference_BT)


def test_token_scores_are_log_probs_with_the_entropy_of_the_same_distribution(llama: Path) -> None:
    engine, batch = engine_of(llama), random_batch()
    scores = engine.token_scores(batch)
    assert scores.entropy_BT is not None
    np.testing.assert_array_equal(scores.logprobs_BT, engine.logprobs(batch))
    tokens = batch.tokens
    with torch.no_grad():
        for row in range(len(batch)):
            token_ids_1T = torch.tensor(tokens.token_ids_BT[row : row + 1, : batch.lengths_B[row]], dtype=torch.int64)
            logits_TV = engine.policy.transformer(token_ids_1T).logits[0].double() / engine.temperature
            entropy_T = torch.distributions.Categorical(logits=logits_TV).entropy().numpy()
            places = np.flatnonzero(tokens.loss_mask_BT[row])
            np.testing.assert_allclose(scores.entropy_BT[row, places], entropy_T[places - 1], atol=1e-4)
    assert not scores.entropy_BT[~tokens.loss_mask_BT].any()


FULL = AlgoConfig(entropy_coef=0.05, kl=KlConfig(placement="loss", estimator="k3", coef=0.1))


def plain_loss(engine: TrainEngine, batch: Batch, algo: AlgoConfig) -> Tensor:
    """A second implementation: token by token over the full logits of one row at a time."""
    arrays = batch.tokens
    assert batch.weights_B is not None
    assert batch.advantages_B is not None
    assert batch.old_logprobs_BT is not None
    assert batch.reference_logprobs_BT is not None
    total = torch.zeros((), dtype=torch.float64)
    for row in range(len(batch)):
        token_ids_T = torch.tensor(arrays.token_ids_BT[row, : batch.lengths_B[row]], dtype=torch.int64)
        logits_TV = engine.model.transformer(token_ids_T[None]).logits[0] / engine.temperature
        for t in range(1, len(token_ids_T)):
            if not arrays.loss_mask_BT[row, t]:
                continue
            logprobs_V = torch.log_softmax(logits_TV[t - 1], dim=-1)
            logprob = logprobs_V[token_ids_T[t]]
            ratio = torch.exp(logprob - float(batch.old_logprobs_BT[row, t]))
            advantage = float(batch.advantages_B[row])
            clipped = ratio.clamp(1 - algo.clip_low, 1 + algo.clip_high)
            loss = torch.maximum(-ratio * advantage, -clipped * advantage)
            difference = logprob - float(batch.reference_logprobs_BT[row, t])
            factor = ratio if algo.kl.unbiased else 1.0
            loss = loss + algo.kl.coef * factor * (torch.exp(-difference) - 1 + difference)
            loss = loss + algo.entropy_coef * (logprobs_V.exp() * logprobs_V).sum()
            total = total + float(batch.weights_B[row]) * loss
    return total


def test_logprobs_are_those_of_the_full_logits_at_the_rollouts_temperature(llama: Path) -> None:
    engine, batch = engine_of(llama, temperature=0.7, micro_batch_tokens=40), random_batch()
    logprobs_BT = engine.logprobs(batch)
    arrays = batch.tokens
    for row, length in enumerate(batch.lengths_B):
        token_ids_T = torch.tensor(arrays.token_ids_BT[row, :length], dtype=torch.int64)
        with torch.no_grad():
            logits_TV = engine.model.transformer(token_ids_T[None]).logits[0]
        full_TV = torch.log_softmax(logits_TV / 0.7, dim=-1)
        for t in range(arrays.token_ids_BT.shape[1]):
            expected = float(full_TV[t - 1, token_ids_T[t]]) if arrays.loss_mask_BT[row, t] else 0.0
            assert logprobs_BT[row, t] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("unbiased", [False, True])
def test_the_loss_and_its_gradient_equal_a_plain_loop(llama: Path, unbiased: bool) -> None:
    algo = replace(FULL, kl=replace(FULL.kl, unbiased=unbiased))
    batch = policy_batch(engine := engine_of(llama, algo, temperature=0.8, max_grad_norm=0.0))
    loss = plain_loss(engine, batch, algo)
    expected = torch.autograd.grad(loss, engine._optimizer.parameters)
    gradients, metrics = gradients_of(engine, batch)
    assert metrics["policy/loss"] == pytest.approx(loss.item(), rel=1e-9)
    torch.testing.assert_close(gradients, list(expected), rtol=1e-8, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
def test_any_split_into_micro_batches_gives_the_same_gradient_and_metrics(llama: Path, aggregation: Any) -> None:
    whole, batch = engine_of(llama, FULL, max_grad_norm=0.0), None
    batch = policy_batch(whole, aggregation=aggregation, num_groups=4, samples=2)
    expected, metrics = gradients_of(whole, batch)
    longest = int(batch.lengths_B.max())
    seen = {1}
    for rows in (1, 2, 4):
        engine = engine_of(llama, FULL, max_grad_norm=0.0, micro_batch_tokens=rows * longest)
        seen.add(len(micro_batches(batch.lengths_B, rows * longest)))
        gradients, split_metrics = gradients_of(engine, batch)
        for mine, theirs in zip(gradients, expected, strict=True):
            assert (mine - theirs).norm() <= 1e-6 * theirs.norm()
        assert untimed(split_metrics) == pytest.approx(untimed(metrics), rel=1e-6)
    assert len(seen) == 4, "the splits must differ"


@pytest.mark.slow
def test_an_update_is_one_step_of_adamw_that_spares_vectors_from_weight_decay(llama: Path) -> None:
    engine = engine_of(llama, weight_decay=0.1, max_grad_norm=0.5, lr=0.01, micro_batch_tokens=60)
    other = engine_of(llama, weight_decay=0.1)
    batch = policy_batch(engine)
    named = list(other.model.transformer.named_parameters())
    plain_loss(other, batch, AlgoConfig(kl=KlConfig(coef=0.0))).backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_([pair for _, pair in named], 0.5)
    plain = torch.optim.AdamW(
        [
            {"params": [pair for name, pair in named if "norm" not in name], "weight_decay": 0.1},
            {"params": [pair for name, pair in named if "norm" in name], "weight_decay": 0.0},
        ],
        lr=0.01,
    )
    plain.step()
    engine.update(batch)
    torch.testing.assert_close(weights_of(engine), weights_of(other), rtol=1e-7, atol=1e-9)


def test_without_old_logprobs_the_ratio_is_one_and_the_gradient_is_that_of_the_policy_itself(llama: Path) -> None:
    batch = random_batch()
    on_policy = engine_of(llama)
    with_pass = replace(batch, old_logprobs_BT=on_policy.logprobs(batch))
    expected, _ = gradients_of(engine_of(llama), with_pass)
    gradients, metrics = gradients_of(on_policy, batch)
    assert metrics["policy/ratio_mean"] == 1.0
    assert metrics["policy/approx_kl"] == 0.0
    torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-7)  # the pass is kept in float32


def test_policy_metrics_are_averages_over_loss_tokens(llama: Path) -> None:
    engine = engine_of(llama, FULL, micro_batch_tokens=50)
    batch = policy_batch(engine)
    assert batch.old_logprobs_BT is not None
    assert batch.reference_logprobs_BT is not None
    mask_BT = batch.tokens.loss_mask_BT
    logprobs_BT = engine.logprobs(batch)
    ratios = np.exp((logprobs_BT - batch.old_logprobs_BT)[mask_BT].astype(np.float64))
    difference = (logprobs_BT - batch.reference_logprobs_BT)[mask_BT].astype(np.float64)
    advantages = np.repeat(np.asarray(batch.advantages_B), mask_BT.sum(1))
    metrics = engine.update(batch)
    assert metrics["policy/ratio_mean"] == pytest.approx(ratios.mean(), rel=1e-5)
    assert metrics["policy/ratio_max"] == pytest.approx(ratios.max(), rel=1e-5)
    assert metrics["policy/kl"] == pytest.approx((np.exp(-difference) - 1 + difference).mean(), rel=1e-5)
    assert metrics["policy/approx_kl"] == pytest.approx((ratios - 1 - np.log(ratios)).mean(), rel=1e-5)
    assert metrics["policy/clip_frac_low"] == pytest.approx(((ratios < 0.8) & (advantages < 0)).mean())
    assert metrics["policy/clip_frac_high"] == pytest.approx(((ratios > 1.28) & (advantages > 0)).mean())
    assert 0.0 < metrics["policy/entropy"] < np.log(264)
    assert metrics["actor/grad_norm"] > 0
    assert (metrics["actor/lr"], metrics["actor/skipped"]) == (1e-3, 0.0)


def broken_at(calls: set[int], how: Callable[[Tensor], Tensor]) -> Any:
    """A policy loss whose output is broken at the calls (micro-batches, from 0) that are named."""
    count = iter(range(1000))
    good = PolicyLoss(clip, AlgoConfig())

    def loss(micro: MicroBatch, predictions: Predictions) -> LossTerms:
        terms = good(micro, predictions)
        return replace(terms, loss_BT=how(terms.loss_BT)) if next(count) in calls else terms

    return loss


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_leaves_weights_and_optimizer_bitwise_untouched(llama: Path, bad: float) -> None:
    loss = broken_at({2}, lambda loss_BT: loss_BT * bad)  # the first micro-batch of the second update
    engine = engine_of(llama, loss=loss, dtype="float32", micro_batch_tokens=100)
    batch = random_batch()
    assert len(micro_batches(batch.lengths_B, 100)) == 2
    engine.update(batch)
    weights, (tensors, values) = weights_of(engine), engine._optimizer.state()
    before = {name: rows.tensor.clone() for name, rows in tensors.items()}
    metrics = engine.update(batch)
    assert metrics["actor/skipped"] == 1.0
    assert all(np.isfinite(metric) for metric in metrics.values())
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(weights_of(engine), weights, strict=True))
    after, values_after = engine._optimizer.state()
    assert all(torch.equal(after[name].tensor, tensor) for name, tensor in before.items())
    assert values_after == values
    assert engine.update(batch)["actor/skipped"] == 0.0
    assert engine.updates_done == 2


def test_a_minibatch_without_weight_leaves_weights_and_optimizer_bitwise_untouched(llama: Path) -> None:
    engine, batch = engine_of(llama, dtype="float32", weight_decay=0.1), random_batch()
    engine.update(batch)  # from here on there is momentum, which would move the weights
    weights, (tensors, _) = weights_of(engine), engine._optimizer.state()
    before = {name: rows.tensor.clone() for name, rows in tensors.items()}
    assert engine.update(replace(batch, weights_B=np.zeros(len(batch), dtype=np.float32))) == {"actor/skipped": 1.0}
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(weights_of(engine), weights, strict=True))
    after, _ = engine._optimizer.state()
    assert all(torch.equal(after[name].tensor, tensor) for name, tensor in before.items())
    assert engine.updates_done == 1


@pytest.mark.slow
def test_three_skipped_updates_in_a_row_stop_the_run_and_a_good_one_between_them_does_not(llama: Path) -> None:
    loss = broken_at({0, 1, 3, 4, 5}, lambda loss_BT: loss_BT * float("nan"))
    engine, batch = engine_of(llama, loss=loss, max_skipped_updates=3), random_batch()
    assert [engine.update(batch)["actor/skipped"] for _ in range(5)] == [1.0, 1.0, 0.0, 1.0, 1.0]
    with pytest.raises(WorkerError, match=r"actor: 3 updates in a row.*max_skipped_updates=3"):
        engine.update(batch)


def test_learning_rates_of_a_schedule_computed_by_hand() -> None:
    def rates(**settings: Any) -> list[float]:
        config = EngineConfig(lr=8.0, **settings)
        return [learning_rate(config, update, update, 6) for update in range(6)]

    assert rates(warmup_steps=2) == [4.0, 8.0, 8.0, 8.0, 8.0, 8.0]
    assert rates(warmup_steps=2, lr_schedule="linear") == [4.0, 8.0, 8.0, 6.0, 4.0, 2.0]
    cosine = rates(lr_schedule="cosine")
    assert cosine[::3] == pytest.approx([8.0, 4.0])
    assert cosine[2] == pytest.approx(6.0)
    assert rates(min_lr_ratio=0.25, warmup_steps=2, lr_schedule="linear") == [4.0, 8.0, 8.0, 6.5, 5.0, 3.5]
    assert rates(min_lr_ratio=0.5, lr_schedule="cosine")[::3] == pytest.approx([8.0, 6.0])


def test_the_schedule_follows_the_run_and_the_warm_up_the_steps_taken() -> None:
    config = EngineConfig(lr=8.0, warmup_steps=2, lr_schedule="linear")
    assert [learning_rate(config, 5, position, 6) for position in (0, 2, 4, 6, 9)] == [8.0, 8.0, 4.0, 0.0, 0.0]
    assert [learning_rate(config, update, 4, 6) for update in range(4)] == [4.0, 8.0, 4.0, 4.0]


def test_skipped_and_missing_updates_do_not_hold_up_a_falling_schedule(llama: Path) -> None:
    loss = broken_at({1}, lambda loss_BT: loss_BT * float("nan"))
    engine, batch = engine_of(llama, loss=loss, lr_schedule="linear"), random_batch()
    engine.expect(8)
    updated = [engine.update(replace(batch, updates_left=left)) for left in (8, 7, 6, 2, 1)]
    assert [metrics["actor/skipped"] for metrics in updated] == [0.0, 1.0, 0.0, 0.0, 0.0]
    assert [metrics["actor/lr"] for metrics in updated] == pytest.approx([1e-3, 8.75e-4, 7.5e-4, 2.5e-4, 1.25e-4])


def test_a_falling_schedule_needs_the_number_of_updates(llama: Path) -> None:
    engine, batch = engine_of(llama, lr_schedule="linear"), random_batch()
    with pytest.raises(ConfigError, match=r"actor\.lr_schedule=linear.*train\.max_steps"):
        engine.update(batch)
    engine.expect(4)
    assert [engine.update(batch)["actor/lr"] for _ in range(2)] == pytest.approx([1e-3, 0.75e-3])


@pytest.mark.slow
def test_bfloat16_weights_learn_by_updates_that_are_smaller_than_their_precision(llama: Path) -> None:
    engine, batch = engine_of(llama, dtype="bfloat16", lr=1e-6, micro_batch_tokens=60), random_batch()
    start = [master.clone() for master in engine._optimizer.masters]
    for _ in range(3):
        assert engine.update(batch)["actor/skipped"] == 0.0
    moved = [(now - then).abs().max().item() for now, then in zip(engine._optimizer.masters, start, strict=True)]
    assert all(2.5e-6 < tensor < 3.5e-6 for tensor in moved)
    assert engine.model.transformer.dtype == torch.bfloat16


def value_loss(micro: MicroBatch, predictions: Predictions) -> LossTerms:
    assert micro.batch.returns_BT is not None
    return LossTerms(0.5 * (predictions.scores_BT - micro.per_token(micro.batch.returns_BT)) ** 2)


@pytest.mark.slow
def test_a_value_model_starts_at_zero_and_learns_its_targets(llama: Path) -> None:
    batch = random_batch()
    mask_BT = batch.tokens.loss_mask_BT
    returns_BT = (np.asarray(batch.rewards_B)[:, None] * mask_BT).astype(np.float32)
    batch = replace(batch, returns_BT=returns_BT)
    engine = engine_of(llama, kind="value", loss=value_loss, lr=1e-2, micro_batch_tokens=80)

    def error(values_BT: Float32s) -> float:
        return float(((values_BT - returns_BT)[mask_BT] ** 2).mean())

    assert not engine.values(batch).any()
    for _ in range(12):
        engine.update(batch)
    values_BT = engine.values(batch)
    assert not values_BT[~mask_BT].any()
    assert error(values_BT) < 0.2 * error(np.zeros_like(values_BT))


def test_a_value_is_that_of_the_state_before_the_token(llama: Path) -> None:
    """Changing a token changes values after it, never its own or an earlier one."""
    batch = random_batch(num_groups=1, samples=1, seed=5)
    engine = engine_of(llama, kind="value", loss=value_loss)
    torch.nn.init.normal_(engine.model.value_head.weight, generator=torch.Generator().manual_seed(0))  # type: ignore[union-attr,arg-type]
    arrays = batch.tokens
    place = int(np.flatnonzero(arrays.loss_mask_BT[0])[2])
    changed = arrays.token_ids_BT.copy()
    changed[0, place] += 1 if changed[0, place] < 200 else -1
    before = engine.values(batch)
    after = engine.values(replace(batch, tokens=replace(arrays, token_ids_BT=changed)))
    np.testing.assert_array_equal(before[0, : place + 1], after[0, : place + 1])
    assert (before[0, place + 1 : int(batch.lengths_B[0])] != after[0, place + 1 : int(batch.lengths_B[0])]).all()


def test_each_kind_of_engine_says_only_what_it_knows(llama: Path) -> None:
    batch = random_batch()
    with pytest.raises(ConfigError, match="kind value has no token probabilities"):
        engine_of(llama, kind="value", loss=value_loss).logprobs(batch)
    with pytest.raises(ConfigError, match="kind causal_lm has no values"):
        engine_of(llama).values(batch)


def test_a_model_that_does_not_exist_is_a_one_line_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path='.*nowhere'") as caught:
        engine_of(tmp_path / "nowhere")
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_rows_without_a_loss_token_change_nothing(llama: Path) -> None:
    batch = policy_batch(engine_of(llama))
    arrays = batch.tokens
    mask_BT = arrays.loss_mask_BT.copy()
    mask_BT[0] = False
    masked = replace(batch, tokens=replace(arrays, loss_mask_BT=mask_BT))
    expected, _ = gradients_of(engine_of(llama), select(batch, range(1, len(batch))))
    gradients, _ = gradients_of(engine_of(llama, micro_batch_tokens=30), masked)
    torch.testing.assert_close(gradients, expected, rtol=1e-7, atol=1e-10)
