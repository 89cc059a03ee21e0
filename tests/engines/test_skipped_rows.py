"""Rows that add nothing to the gradient are not computed, and the weights are those of all rows computed."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from rlcore.algo.loss import clip
from rlcore.config import AlgoConfig, EngineConfig, LoraConfig, ModelConfig
from rlcore.data.batch import select
from rlcore.data.dealt import split
from rlcore.data.row_costs import LayerCost
from rlcore.engines.hf import TrainEngine
from rlcore.engines.hf.train import engine as engine_module
from rlcore.engines.hf.train.policy_loss import PolicyLoss, taught_rows
from rlcore.engines.hf.train.ranks import Ranks, balanced, computed_tokens
from rlcore.engines.hf.train.shards import idle
from rlcore.testing.runs import untimed
from rlcore.testing.tiny import random_batch, write_tiny_model
from rlcore.types import Batch, Int64s, Metrics, SharedPrefix

torch.set_num_threads(1)

SKIPPED = "actor/rows_skipped_frac"
SAMPLES = 3


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "llama", num_key_value_heads=2)


def engine_of(path: Path, *, skips: bool, way: SharedPrefix = SharedPrefix.NONE, **settings: Any) -> TrainEngine:
    config = EngineConfig(**{"lr": 1e-3, "weight_decay": 0.1, "micro_batch_tokens": 1, **settings})
    loss = PolicyLoss(clip, AlgoConfig())
    taught = taught_rows if skips else None
    return TrainEngine("causal_lm", ModelConfig(path=str(path)), config, loss, shared_prefix=way, taught_rows=taught)


def batch_of(zero_rows: Sequence[int], seed: int = 0) -> Batch:
    """Four groups of three rows, with log-probs of pi_old that differ from the model's and advantages of 0 in rows."""
    batch = random_batch(num_groups=4, samples=SAMPLES, seed=seed)
    advantages_B = np.where(np.isin(np.arange(len(batch)), zero_rows), np.float32(0.0), batch.advantages_B)
    return replace(batch, advantages_B=advantages_B, old_logprobs_BT=batch.tokens.rollout_logprobs_BT)


def groups(*numbers: int) -> list[int]:
    return [group * SAMPLES + sample for group in numbers for sample in range(SAMPLES)]


def everything_of(engine: TrainEngine) -> list[Tensor]:
    """Weights, masters and the optimizer's state."""
    tensors, _ = engine._optimizer.state()
    return [
        *(weight.detach().clone() for weight in engine.model.parameters()),
        *(rows.tensor.clone() for rows in tensors.values()),
    ]


def same_bits(left: TrainEngine, right: TrainEngine) -> bool:
    pairs = list(zip(everything_of(left), everything_of(right), strict=True))
    assert len(pairs) > 40
    return all(torch.equal(left, right) for left, right in pairs)


def computed_rows(engine: TrainEngine, batch: Batch) -> tuple[int, Metrics]:
    """Number of rows that an update computes, and its metrics."""
    num, forward = 0, engine.model.forward

    def counted(micro: Any, *rest: Any) -> Any:
        nonlocal num
        num += len(micro.batch)
        return forward(micro, *rest)

    engine.model.forward = counted  # type: ignore[method-assign]
    try:
        metrics = engine.update(batch)
    finally:
        del engine.model.forward
    return num, metrics


def compositions(batch: Batch, tokens: int, way: SharedPrefix) -> tuple[list[list[int]], list[list[int]]]:
    """Rows of the micro-batches of all rows that hold a taught one, and of those of the taught rows alone."""
    taught = np.flatnonzero(taught_rows(batch))
    whole = [rows.tolist() for rows in split(batch, tokens, way) if np.isin(rows, taught).any()]
    alone = [taught[rows].tolist() for rows in split(select(batch, taught), tokens, way)]
    return whole, alone


WAYS: dict[str, dict[str, Any]] = {
    "rows one by one": {},
    "groups, packed": {"way": SharedPrefix.TREE, "micro_batch_tokens": 20},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "lora": {"lora": LoraConfig(enabled=True, rank=4)},
}


@pytest.mark.slow
@pytest.mark.parametrize("settings", WAYS.values(), ids=WAYS)
def test_weights_are_bitwise_those_of_all_rows_computed(llama: Path, settings: dict[str, Any]) -> None:
    """Three updates with momentum and weight decay; micro-batches hold taught rows alone, the same in both engines."""
    skipping, whole = (engine_of(llama, skips=skips, **settings) for skips in (True, False))
    way, tokens = settings.get("way", SharedPrefix.NONE), settings.get("micro_batch_tokens", 1)
    for seed, zero in enumerate([groups(1, 2), groups(3), groups(0)]):
        batch = batch_of(zero, seed)
        mixed, alone = compositions(batch, tokens, way)
        assert mixed == alone, "the case is not one of the same micro-batches"
        (num, metrics), (num_whole, expected) = (computed_rows(engine, batch) for engine in (skipping, whole))
        assert (num, num_whole) == (len(batch) - len(zero), len(batch))
        assert metrics[SKIPPED] == pytest.approx(len(zero) / len(batch))
        assert SKIPPED not in expected
        for name in ("policy/loss", "actor/grad_norm", "actor/lr", "actor/skipped"):
            assert metrics[name] == expected[name], name
        assert metrics["actor/grad_norm"] > 0
        assert same_bits(skipping, whole)


@pytest.mark.parametrize("way", [SharedPrefix.NONE, SharedPrefix.TREE])
def test_other_micro_batches_change_the_rounding_of_sums_and_nothing_else(llama: Path, way: SharedPrefix) -> None:
    """Rows with zero advantages are mixed with others here, so the order of summation differs without them."""
    batch, gradients = batch_of([0, 4, *groups(2)]), []
    mixed, alone = compositions(batch, 60, way)
    assert mixed != alone
    for skips in (True, False):
        engine = engine_of(llama, skips=skips, way=way, dtype="float64", micro_batch_tokens=60)
        engine._accumulate(batch, engine._taught(batch))
        gradients.append([cast("Tensor", weight.grad) for weight in engine._optimizer.parameters])
    for mine, theirs in zip(*gradients, strict=True):
        assert theirs.norm() > 0
        assert (mine - theirs).norm() <= 1e-12 * theirs.norm()


@pytest.mark.slow
@pytest.mark.parametrize("settings", WAYS.values(), ids=WAYS)
def test_without_any_advantage_the_optimizer_steps_with_gradients_of_zero(
    llama: Path, settings: dict[str, Any]
) -> None:
    """Moments and weights decay and momentum moves the weights, as with all rows computed; the step counts."""
    skipping, whole = (engine_of(llama, skips=skips, **settings) for skips in (True, False))
    nothing = batch_of(groups(0, 1, 2, 3), seed=1)
    for batch in (batch_of([], 0), nothing, nothing, batch_of(groups(1), 2)):
        before = everything_of(skipping)
        (num, metrics), (_, expected) = (computed_rows(engine, batch) for engine in (skipping, whole))
        if batch is nothing:
            assert num == 1, "gradients of 0 take the graph of one row"
            assert (metrics[SKIPPED], metrics["policy/loss"], metrics["actor/grad_norm"]) == (1.0, 0.0, 0.0)
            assert not [name for name in metrics if name.startswith("policy/") and name != "policy/loss"]
            assert metrics["actor/skipped"] == expected["actor/skipped"] == 0.0
            assert not all(torch.equal(*pair) for pair in zip(before, everything_of(skipping), strict=True))
        assert same_bits(skipping, whole)
    assert skipping.updates_done == whole.updates_done == 4


@pytest.mark.slow
def test_a_first_update_without_any_advantage_is_that_of_all_rows_computed(llama: Path) -> None:
    engines = [engine_of(llama, skips=skips) for skips in (True, False)]
    for engine in engines:
        engine.update(batch_of(groups(0, 1, 2, 3)))
    assert same_bits(*engines)


def test_a_row_is_taught_by_a_weight_and_one_advantage_at_a_loss_token() -> None:
    batch = batch_of([1, 5])
    assert np.flatnonzero(~taught_rows(batch)).tolist() == [1, 5]
    mask_BT = batch.tokens.loss_mask_BT
    advantages_BT = np.where(mask_BT, np.float32(0.0), np.float32(1.0))  # outside the mask they count for nothing
    for row, value in ((2, 1e-30), (3, np.nan), (7, -0.5)):
        advantages_BT[row, np.flatnonzero(mask_BT[row])[-1]] = value
    per_token = replace(batch, advantages_B=None, advantages_BT=advantages_BT)
    assert np.flatnonzero(taught_rows(per_token)).tolist() == [2, 3, 7]
    assert batch.weights_B is not None
    weightless = replace(batch, weights_B=np.where(np.arange(12) == 8, np.float32(0.0), batch.weights_B))
    assert np.flatnonzero(~taught_rows(weightless)).tolist() == [1, 5, 8]
    with pytest.raises(ValueError, match="has no advantages"):
        taught_rows(replace(batch, advantages_B=None))


@pytest.mark.slow
def test_metrics_are_averages_over_the_rows_that_are_computed(llama: Path) -> None:
    zero = groups(1, 2)
    batch = batch_of(zero)
    rest = np.setdiff1d(np.arange(len(batch)), zero)
    metrics = engine_of(llama, skips=True).update(batch)
    alone = engine_of(llama, skips=False).update(select(batch, rest))
    all_rows = engine_of(llama, skips=False).update(batch)
    assert untimed(metrics) == {**untimed(alone), SKIPPED: 0.5}
    assert metrics["policy/entropy"] != pytest.approx(all_rows["policy/entropy"], rel=1e-5)
    assert metrics["policy/loss"] == all_rows["policy/loss"]


def test_rows_of_weight_zero_are_neither_computed_nor_averaged_where_each_token_has_a_gradient(llama: Path) -> None:
    batch = batch_of([])
    masked = np.arange(len(batch)) % 3 == 0
    assert batch.weights_B is not None
    weightless = replace(batch, weights_B=np.where(masked, np.float32(0.0), batch.weights_B))
    num, metrics = computed_rows(engine_of(llama, skips=False), weightless)
    alone = engine_of(llama, skips=False).update(select(weightless, np.flatnonzero(~masked)))
    assert num == len(batch) - masked.sum()
    assert untimed(metrics) == untimed(alone)


@pytest.mark.slow
def test_operations_of_rows_that_are_not_computed_do_not_count(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = []

    def flops(model: Any, batch: Batch, way: SharedPrefix) -> float:
        counted.append(len(batch))
        return 0.0

    monkeypatch.setattr(engine_module, "update_flops", flops)
    engine = engine_of(llama, skips=True)
    for zero in (groups(1), [], groups(0, 1, 2, 3)):
        engine.update(batch_of(zero))
    assert counted == [9, 12, 0]


class RecordedRanks:
    """Rank `rank` of two, of which only this one is there: its exchanges by name."""

    device = torch.device("cpu")
    context = None

    def __init__(self, rank: int) -> None:
        self.rank, self.num = rank, 2
        self.exchanges: list[str] = []

    def micro_batches(
        self, batch: Batch, most: int, way: SharedPrefix, cost: LayerCost, *, together: bool
    ) -> list[Int64s]:
        assert cost.per_seen > 0  # of the model
        assert not together  # each rank has whole weights
        rows = np.flatnonzero(balanced(computed_tokens(batch, way), np.arange(len(batch)), 2) == self.rank)
        return [rows[part] for part in split(select(batch, rows), most, way)] if len(rows) else []

    def sum_gradients(self, parameters: Sequence[Tensor]) -> None:
        self.exchanges.append("gradients")

    def gather(self, value: dict[str, Any]) -> list[dict[str, Any]]:
        self.exchanges.append("metrics")
        return [value]


@pytest.mark.slow
@pytest.mark.parametrize("zero", [groups(1), [*range(11)], groups(0, 1, 2, 3)], ids=["some", "all but one", "all"])
def test_each_rank_makes_the_same_exchanges_and_their_gradients_are_those_of_one(llama: Path, zero: list[int]) -> None:
    batch = batch_of(zero)
    whole = engine_of(llama, skips=False, dtype="float64")
    whole._accumulate(batch, batch)
    sums, exchanges = [torch.zeros_like(weight) for weight in whole._optimizer.parameters], []
    for rank in range(2):
        engine, ranks = engine_of(llama, skips=True, dtype="float64"), RecordedRanks(rank)
        engine.ranks = cast("Ranks", ranks)
        engine._accumulate(batch, engine._taught(batch))
        exchanges.append(ranks.exchanges)
        for total, weight in zip(sums, engine._optimizer.parameters, strict=True):
            total += 0.0 if weight.grad is None else weight.grad
    assert exchanges[0] == exchanges[1] == ["gradients", "metrics"]
    for total, weight in zip(sums, whole._optimizer.parameters, strict=True):
        torch.testing.assert_close(total, cast("Tensor", weight.grad), rtol=1e-10, atol=1e-15)


def test_the_row_of_weight_zero_has_a_loss_token() -> None:
    """A row without one has no logits, and would leave the output layer without a gradient."""
    batch = random_batch(num_groups=3, samples=2)
    shortest = int(batch.lengths_B.argmin())
    num_sampled_B = np.where(np.arange(len(batch)) == shortest, 0, batch.num_sampled_B)
    others_B = np.where(np.arange(len(batch)) == shortest, 999, batch.lengths_B)
    assert int(idle(batch).lengths_B[0]) == int(batch.lengths_B[shortest])
    row = idle(replace(batch, num_sampled_B=num_sampled_B))
    assert (int(row.lengths_B[0]), row.num_sampled_B.all()) == (int(others_B.min()), True)
    assert row.weights_B is not None
    assert row.weights_B.tolist() == [0.0]
