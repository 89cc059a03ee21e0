"""An update waits for the device a few times, however many micro-batches and metrics it has."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlcore.algo.loss import clip
from rlcore.config import AlgoConfig, EngineConfig, KlConfig, ModelConfig
from rlcore.engines.hf import LossTerms, TrainEngine
from rlcore.engines.hf.train import head
from rlcore.engines.hf.train.microbatch import MetricSums, ReadMetrics
from rlcore.engines.hf.train.policy_loss import PolicyLoss
from rlcore.testing.runs import untimed
from rlcore.testing.tiny import random_batch, write_tiny_model
from rlcore.types import Batch, SharedPrefix

torch.set_num_threads(1)

WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique_consecutive", "_unique2")
"""Operations whose result, or its shape, the host has to know."""
READS = 1
"""The norm of the gradients. Loss and metrics are copied in one piece, which is none of these operations."""
READS_PER_PASS = 1
"""transformers looks at the positions: is the sequence a packed one?"""


class Waits(TorchDispatchMode):
    """Counts the operations that would wait for an accelerator."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        masks = any(isinstance(index, Tensor) and index.dtype is torch.bool for index in indices)
        if name in WAITING or masks:
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "llama", num_key_value_heads=2)


@pytest.fixture(autouse=True)
def as_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU looks for tokens that are ruled out before it treats them, where that look costs nothing."""

    def weighted(masses_nV: Tensor, logits_nV: Tensor) -> Tensor:
        return torch.linalg.vecdot(masses_nV, head._finite(logits_nV))

    monkeypatch.setattr(head, "_weighted", weighted)


def engine_of(path: Path, micro_batch_tokens: int, way: SharedPrefix) -> TrainEngine:
    algo = AlgoConfig(dual_clip=3.0, entropy_coef=0.01, kl=KlConfig(placement="loss", coef=0.1))
    config = EngineConfig(micro_batch_tokens=micro_batch_tokens, lr=1e-3)
    loss = PolicyLoss(clip, algo, sampler_differs=True)
    return TrainEngine("causal_lm", ModelConfig(path=str(path)), config, loss, shared_prefix=way)


def full_batch() -> Batch:
    batch = random_batch(num_groups=4, samples=3)
    recorded = batch.tokens.rollout_logprobs_BT
    return replace(batch, old_logprobs_BT=recorded, reference_logprobs_BT=recorded)


@pytest.mark.slow
@pytest.mark.parametrize("way", [SharedPrefix.NONE, SharedPrefix.TREE])
@pytest.mark.parametrize("micro_batch_tokens", [1, 60, 100_000])
def test_an_update_waits_once_however_many_metrics_it_has(
    llama: Path, micro_batch_tokens: int, way: SharedPrefix
) -> None:
    engine, batch = engine_of(llama, micro_batch_tokens, way), full_batch()
    engine.update(batch)  # transformers looks around once
    passes = 0
    forward = engine.model.forward

    def counted(*args: Any) -> Any:
        nonlocal passes
        passes += 1
        return forward(*args)

    engine.model.forward = counted  # type: ignore[method-assign]
    with Waits() as waits:
        metrics = engine.update(batch)
    assert {1: passes == len(batch), 60: 1 < passes < len(batch), 100_000: passes == 1}[micro_batch_tokens]
    assert len([name for name in metrics if name.startswith("policy/")]) > 10
    assert sum(waits.found.values()) <= READS + READS_PER_PASS * passes, waits.found


def test_the_counter_sees_what_waits() -> None:
    mask, numbers = torch.tensor([True, False]), torch.tensor([1.0, 2.0])
    with Waits() as waits:
        assert float(numbers.sum()) == 3.0
        assert numbers[mask].numel() == 1
        assert mask.nonzero().numel() == 1
        numbers[mask] = torch.tensor([3.0])
    assert waits.found["_local_scalar_dense"] == 1
    assert waits.found["nonzero"] >= 1
    assert waits.found["index"] + waits.found["index_put_"] >= 2


def test_sums_and_maxima_are_those_of_the_masked_tokens_of_all_micro_batches() -> None:
    """A value outside the mask, NaN included, has no influence; nor has the division into micro-batches."""
    values_BT = torch.tensor([[1.0, float("nan"), 3.0], [-4.0, -5.0, float("inf")]])
    mask_BT = torch.tensor([[True, False, True], [True, True, False]])
    counted_BT = torch.tensor([[True, True, False], [False, False, True]])
    terms = [
        LossTerms(row_1T, {"mean": row_1T, "a_max": row_1T, "few": row_1T}, {"few": counted_BT[index : index + 1]})
        for index, row_1T in enumerate(values_BT.split(1))
    ]
    together, one_by_one = MetricSums(), MetricSums()
    whole = LossTerms(values_BT, {"mean": values_BT, "a_max": values_BT, "few": values_BT}, {"few": counted_BT})
    together.add(whole, mask_BT, torch.tensor(1.5))
    for index, row in enumerate(terms):
        one_by_one.add(row, mask_BT[index : index + 1], torch.tensor(0.75))
    for sums in (together, one_by_one):
        found = sums.read()
        assert found.loss == 1.5
        assert found.result() == {"mean": -1.25, "a_max": 3.0, "few": 1.0}


def test_a_metric_that_no_token_counts_for_is_not_reported() -> None:
    nothing = torch.zeros(1, 2, dtype=torch.bool)
    sums = MetricSums()
    terms = LossTerms(torch.zeros(1, 2), {"mean": torch.ones(1, 2), "a_max": torch.ones(1, 2)})
    sums.add(terms, nothing, torch.ones(()))
    assert sums.read().result() == {}
    assert MetricSums().read().loss == 0.0


@pytest.mark.slow
def test_more_micro_batches_change_no_metric(llama: Path) -> None:
    batch = full_batch()
    many, one = (untimed(engine_of(llama, size, SharedPrefix.NONE).update(batch)) for size in (1, 100_000))
    assert many == pytest.approx(one, rel=1e-4)


@pytest.mark.parametrize("values", [(math.nan, 3.0), (3.0, math.nan)])
def test_the_maximum_over_ranks_is_nan_if_that_of_any_rank_is(values: tuple[float, float]) -> None:
    ranks = [ReadMetrics(0.0, {"a_max": value}, {"a_max": 1.0}) for value in values]
    assert math.isnan(ReadMetrics.merged(ranks).result()["a_max"])
