"""The loss against a plain loop, the worker with a tiny real model, the engine with a fake worker."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rlcore_critic_engine import requests
from rlcore_critic_engine.critic import ValueCritic
from rlcore_critic_engine.loss import ValueLoss
from rlcore_critic_engine.settings import CriticSettings
from rlcore_critic_engine.worker import HfCritic

from rlcore import metrics
from rlcore.algo.aggregation import row_weights
from rlcore.backends.hf import MicroBatch, Predictions
from rlcore.batch import select
from rlcore.config import ClusterConfig, ModelConfig, RunConfig
from rlcore.critic import CriticEngine, CriticWorker
from rlcore.testing import check_component, write_prompts
from rlcore.testing.runs import differing
from rlcore.testing.tiny import random_batch, write_tiny_model
from rlcore.train import train
from rlcore.types import Batch, Ref
from rlcore.workers import WorkerContext


def with_targets(batch: Batch, seed: int = 0) -> Batch:
    """The batch with random values of the step's start and random returns, both 0 outside the loss mask."""
    rng, mask_BT = np.random.default_rng(seed), batch.tokens.get().loss_mask_BT
    values_BT = np.where(mask_BT, rng.standard_normal(mask_BT.shape), 0).astype(np.float32)
    returns_BT = np.where(mask_BT, rng.standard_normal(mask_BT.shape), 0).astype(np.float32)
    return replace(batch, values=Ref(values_BT), returns=Ref(returns_BT))


def plain_value_loss(value: float, old: float, target: float, clip: float) -> float:
    kept = min(max(value, old - clip), old + clip)
    return 0.5 * max((value - target) ** 2, (kept - target) ** 2)


def loss_of(batch: Batch, values_BT: np.ndarray[Any, Any], clip: float) -> Any:
    micro = MicroBatch(batch, torch.device("cpu"))
    scores_BT = torch.tensor(values_BT)
    return ValueLoss(clip)(micro, Predictions(scores_BT, torch.zeros_like(scores_BT)))


def test_the_loss_of_each_token_is_that_of_a_plain_loop() -> None:
    batch = with_targets(random_batch(num_groups=6))
    assert batch.values is not None
    assert batch.returns is not None
    old_BT, returns_BT = batch.values.get(), batch.returns.get()
    values_BT = old_BT + np.random.default_rng(1).standard_normal(old_BT.shape).astype(np.float32)
    terms = loss_of(batch, values_BT, clip=0.2)
    mask_BT = batch.tokens.get().loss_mask_BT
    for row, position in zip(*np.nonzero(mask_BT), strict=True):
        numbers = (float(each[row, position]) for each in (values_BT, old_BT, returns_BT))
        assert float(terms.loss_BT[row, position]) == pytest.approx(plain_value_loss(*numbers, clip=0.2), rel=1e-4)
    assert 0 < float(terms.metrics["critic/clip_frac"].mean()) < 1


@pytest.mark.parametrize(
    ("value", "old", "target", "clip", "expected", "clipped"),
    [
        (1.0, 1.0, 3.0, 0.2, 2.0, 0.0),  # it has not moved: half of (1 - 3)^2
        (2.0, 1.0, 3.0, 0.2, 0.5 * 1.8**2, 1.0),  # it moved towards the target by more than 0.2: held at 1.2
        (0.0, 1.0, 3.0, 0.2, 4.5, 0.0),  # it moved away: nothing holds it from coming back
        (2.0, 1.0, 3.0, 0.0, 0.5, None),  # no clip
    ],
)
def test_the_loss_by_hand(
    value: float, old: float, target: float, clip: float, expected: float, clipped: float | None
) -> None:
    batch = select(random_batch(num_groups=1, samples=1), [0])
    shape = batch.tokens.get().loss_mask_BT.shape
    full = [np.full(shape, number, dtype=np.float32) for number in (value, old, target)]
    terms = loss_of(replace(batch, values=Ref(full[1]), returns=Ref(full[2])), full[0], clip)
    assert terms.loss_BT.numpy() == pytest.approx(expected)
    if clipped is None:
        assert "critic/clip_frac" not in terms.metrics
    else:
        assert terms.metrics["critic/clip_frac"].numpy() == pytest.approx(clipped)


def test_a_batch_without_returns_is_refused() -> None:
    batch = random_batch()
    with pytest.raises(ValueError, match="no returns"):
        loss_of(batch, np.zeros(batch.tokens.get().loss_mask_BT.shape, dtype=np.float32), 0.2)


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def critic(model_directory: Path, **settings: Any) -> HfCritic:
    settings = {"lr": 1e-2, "value_clip": 0.0} | settings
    worker = HfCritic(
        WorkerContext(
            role="critic",
            replica=0,
            rank=0,
            num_ranks=1,
            config=RunConfig(model=ModelConfig(path=str(model_directory), tokenizer="bytes")),
            section=CriticSettings(**settings),
            references={"value_loss": "rlcore_critic_engine.loss:ValueLoss"},
            run_dir=model_directory,
            seed=0,
            threads=1,
            device="cpu",
        )
    )
    worker.setup()
    return worker


def test_values_begin_at_zero_and_updates_bring_them_to_the_returns(model_directory: Path) -> None:
    worker = critic(model_directory)
    batch = random_batch(num_groups=2)
    mask_BT = batch.tokens.get().loss_mask_BT
    start_BT = worker.values(batch).get()
    assert not start_BT.any()
    batch = replace(batch, values=Ref(start_BT), returns=Ref(np.where(mask_BT, 0.7, 0).astype(np.float32)))
    errors = [worker.update(batch)["critic/squared_error"] for _ in range(30)]
    assert errors[0] == pytest.approx(0.49)
    assert errors[-1] < 0.1
    assert not worker.values(batch).get()[~mask_BT].any()


def test_any_split_into_micro_batches_is_the_same_step(model_directory: Path) -> None:
    batch = with_targets(random_batch(num_groups=4))
    batch = replace(batch, weights_B=row_weights("token_mean", batch.num_sampled_B, batch.sample_B))
    one, many = (critic(model_directory, dtype="float64", micro_batch_tokens=tokens) for tokens in (4096, 24))
    first, second = one.update(batch), many.update(batch)
    assert first["critic/loss"] == pytest.approx(second["critic/loss"], rel=1e-9)
    assert first["critic/grad_norm"] == pytest.approx(second["critic/grad_norm"], rel=1e-6)
    assert np.allclose(one.values(batch).get(), many.values(batch).get(), atol=1e-6)


def test_a_restored_critic_goes_on_bit_for_bit(model_directory: Path, tmp_path: Path) -> None:
    batch = with_targets(random_batch())
    worker, other = critic(model_directory), critic(model_directory)
    worker.update(batch)
    worker.save(tmp_path / "saved")
    other.restore(tmp_path / "saved")
    for each in (worker, other):
        each.update(batch)
    assert np.array_equal(worker.values(batch).get(), other.values(batch).get())


@dataclass
class FakeWorker:
    """Remembers the calls."""

    calls: list[tuple[str, tuple[Any, ...]]]
    name: str = "critic[0]"

    async def call(self, method: Any, *args: Any) -> Any:
        self.calls.append((method.__name__, args))
        return {"critic/loss": 1.0}


@dataclass
class FakeGroup:
    replicas: Sequence[Any]


def engine(**settings: Any) -> tuple[ValueCritic, list[tuple[str, tuple[Any, ...]]]]:
    calls: list[tuple[str, tuple[Any, ...]]] = []
    group: Any = FakeGroup([FakeWorker(calls)])
    return ValueCritic(group, CriticSettings(**settings)), calls


def test_only_the_critic_learns_in_the_first_steps() -> None:
    async def steps() -> list[tuple[bool, float]]:
        found = []
        for _ in range(4):
            await critic.values(random_batch())
            found.append((critic.actor_may_update(), critic.metrics()["critic/warming_up"]))
        return found

    critic, calls = engine(actor_starts_after=2)
    assert asyncio.run(steps()) == [(False, 1.0), (False, 1.0), (True, 0.0), (True, 0.0)]
    other, _ = engine(actor_starts_after=2)
    other.restore_state(critic.state())
    assert other.actor_may_update()
    assert [name for name, _ in calls] == ["values"] * 4


def test_a_checkpoint_has_the_critic_in_a_directory_of_its_own(tmp_path: Path) -> None:
    async def both() -> None:
        await critic.save(tmp_path)
        await critic.restore(tmp_path)

    critic, calls = engine()
    asyncio.run(both())
    assert calls == [("save", (tmp_path / "critic",)), ("restore", (tmp_path / "critic",))]


def test_the_engine_keeps_the_contract_of_components() -> None:
    critic, _ = engine()
    assert asyncio.run(check_component(critic, CriticEngine)).problems == ()


def test_one_worker_is_asked_for_and_its_memory_is_known_when_the_model_is_the_policys() -> None:
    [request] = requests(RunConfig(cluster=ClusterConfig(threads=3)), CriticSettings())
    assert (request.role.interface, request.backend, request.threads) == (CriticWorker, "hf", 3)
    assert request.bytes_per_parameter == 16.0
    [other] = requests(RunConfig(), CriticSettings(path="another/model"))
    assert other.bytes_per_parameter == 0.0


def test_a_ppo_run_trains_both_and_goes_on_bit_for_bit(model_directory: Path, tmp_path: Path) -> None:
    def run(name: str, steps: int, resume: bool = False) -> Path:
        config = {
            "model": {"path": str(model_directory), "tokenizer": "bytes"},
            "data": {"sources": {"train": {"path": str(write_prompts(tmp_path / "prompts.jsonl", 12))}}},
            "rollout": {"samples_per_prompt": 2, "max_tokens": 6},
            "reward": {"functions": {"letters": {"fn": "count_letter", "children": 1}}},
            "algo": {"preset": "ppo"},
            "actor": {"lr": 1e-3},
            "cluster": {"threads": 1},
            "plugins": {"critic_engine": {"lr": 1e-3, "actor_starts_after": 1}, "null": {}},
            "train": {"prompts_per_step": 2, "max_steps": steps, "dir": str(tmp_path), "name": name},
        }
        return train(config, resume=resume).run_dir

    whole = run("whole", 4)
    run("halves", 2)
    halves = run("halves", 4, resume=True)
    steps = [row for row in metrics.read(whole) if "reward/mean" in row]
    assert [row["critic/warming_up"] for row in steps] == [1.0, 0.0, 0.0, 0.0]
    assert ["actor/grad_norm" in row for row in steps] == [False, True, True, True]
    assert all(row["critic/grad_norm"] > 0 for row in steps)
    assert differing(whole, halves) == []
