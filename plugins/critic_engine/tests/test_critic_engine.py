"""The loss against a plain loop, what the plugin asks for, and the engine with a fake worker."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import torch
from rlcore_critic_engine import requests, rlcore_resource_pools
from rlcore_critic_engine.critic import ValueCritic
from rlcore_critic_engine.loss import ValueLoss
from rlcore_critic_engine.settings import CriticSettings

from rlcore.config import ClusterConfig, EngineConfig, LoraConfig, ModelConfig, RunConfig
from rlcore.contracts.actor import ACTOR
from rlcore.contracts.critic import CriticWorker
from rlcore.contracts.offers import PoolSpec
from rlcore.contracts.requests import ModelFacts, ModelShape
from rlcore.data.batch import select
from rlcore.engines.hf import MicroBatch, Predictions
from rlcore.errors import ConfigError
from rlcore.testing.tiny import random_batch
from rlcore.types import Batch


def with_targets(batch: Batch, seed: int = 0) -> Batch:
    """The batch with random values of the step's start and random returns, both 0 outside the loss mask."""
    rng, mask_BT = np.random.default_rng(seed), batch.tokens.loss_mask_BT
    values_BT = np.where(mask_BT, rng.standard_normal(mask_BT.shape), 0).astype(np.float32)
    returns_BT = np.where(mask_BT, rng.standard_normal(mask_BT.shape), 0).astype(np.float32)
    return replace(batch, values_BT=values_BT, returns_BT=returns_BT)


def plain_value_loss(value: float, old: float, target: float, clip: float) -> float:
    kept = min(max(value, old - clip), old + clip)
    return 0.5 * max((value - target) ** 2, (kept - target) ** 2)


def loss_of(batch: Batch, values_BT: np.ndarray[Any, Any], clip: float) -> Any:
    micro = MicroBatch(batch, torch.device("cpu"))
    scores_BT = torch.tensor(values_BT)
    return ValueLoss(clip)(micro, Predictions(scores_BT, torch.zeros_like(scores_BT)))


def test_the_loss_of_each_token_is_that_of_a_plain_loop() -> None:
    batch = with_targets(random_batch(num_groups=6))
    assert batch.values_BT is not None
    assert batch.returns_BT is not None
    old_BT, returns_BT = batch.values_BT, batch.returns_BT
    values_BT = old_BT + np.random.default_rng(1).standard_normal(old_BT.shape)
    terms = loss_of(batch, values_BT, clip=0.2)
    mask_BT = batch.tokens.loss_mask_BT
    for row, position in zip(*np.nonzero(mask_BT), strict=True):
        numbers = (float(tensor[row, position]) for tensor in (values_BT, old_BT, returns_BT))
        assert float(terms.loss_BT[row, position]) == pytest.approx(plain_value_loss(*numbers, clip=0.2), abs=1e-6)
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
    shape = batch.tokens.loss_mask_BT.shape
    full = [np.full(shape, number, dtype=np.float32) for number in (value, old, target)]
    terms = loss_of(replace(batch, values_BT=full[1], returns_BT=full[2]), full[0], clip)
    assert terms.loss_BT.numpy() == pytest.approx(expected)
    if clipped is None:
        assert "critic/clip_frac" not in terms.metrics
    else:
        assert terms.metrics["critic/clip_frac"].numpy() == pytest.approx(clipped)


def test_values_within_the_clip_are_not_counted_as_clipped_by_rounding() -> None:
    batch = with_targets(random_batch(num_groups=6))
    assert batch.values_BT is not None
    moves_BT = np.random.default_rng(1).uniform(-0.15, 0.15, batch.values_BT.shape)
    terms = loss_of(batch, (0.01 * batch.values_BT + moves_BT).astype(np.float32), clip=1000.0)
    assert not terms.metrics["critic/clip_frac"].any()


def test_a_batch_without_returns_is_refused() -> None:
    batch = random_batch()
    with pytest.raises(ValueError, match="no returns"):
        loss_of(batch, np.zeros(batch.tokens.loss_mask_BT.shape, dtype=np.float32), 0.2)


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


def test_only_the_critic_learns_in_the_first_updates() -> None:
    async def updates() -> list[tuple[bool, float]]:
        found, zeros_BT = [], np.zeros(random_batch().tokens.loss_mask_BT.shape, dtype=np.float32)
        for _ in range(4):
            metrics = await critic.update(replace(random_batch(), values_BT=zeros_BT, returns_BT=zeros_BT))
            found.append((critic.actor_may_update(), metrics["critic/warming_up"]))
        return found

    critic, calls = engine(actor_waits_updates=2)
    assert asyncio.run(updates()) == [(False, 1.0), (False, 1.0), (True, 0.0), (True, 0.0)]
    other, _ = engine(actor_waits_updates=2)
    assert not other.actor_may_update()
    other.restore_state(critic.state())
    assert other.actor_may_update()
    assert [name for name, _ in calls] == ["update"] * 4


@pytest.mark.parametrize(("waits", "expected"), [(0, 10), (3, 7), (9, 1)])
def test_both_schedules_end_with_the_run(waits: int, expected: int) -> None:
    critic, calls = engine(actor_waits_updates=waits)
    assert asyncio.run(critic.expect(10)) == expected
    assert calls == [("expect", (10,))]


@pytest.mark.parametrize("waits", [10, 12])
def test_an_actor_that_would_wait_for_the_whole_run_is_refused(waits: int) -> None:
    critic, calls = engine(actor_waits_updates=waits)
    with pytest.raises(ConfigError, match=rf"actor_waits_updates={waits}: the run has 10 .* needs less than 10"):
        asyncio.run(critic.expect(10))
    assert calls == []


def test_a_checkpoint_has_the_critic_in_a_separate_directory(tmp_path: Path) -> None:
    async def both() -> None:
        await critic.save(tmp_path)
        await critic.restore(tmp_path)

    critic, calls = engine()
    asyncio.run(both())
    assert calls == [("save", (tmp_path,)), ("restore", (tmp_path,))]


def test_one_worker_is_asked_for_and_its_memory_is_known_when_the_models_size_is(
    sizes: dict[str, Any], tmp_path: Path
) -> None:
    [request] = requests(RunConfig(cluster=ClusterConfig(threads=3)), CriticSettings())
    assert (request.role.interface, request.backend, request.threads) == (CriticWorker, "hf", 3)
    assert (request.bytes_per_parameter, request.pool, request.embedded_in) == (16.0, "main", None)
    [other] = requests(RunConfig(), CriticSettings(path="another/model"))
    assert (other.bytes_per_parameter, other.model) == (0.0, ModelFacts())
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**sizes, "model_type": "qwen2"}))
    [local] = requests(RunConfig(), CriticSettings(path=str(tmp_path)))
    assert local.bytes_per_parameter == 16.0
    assert local.model is not None
    assert local.model.parameters == 100 * 8 + 2 * (4 * 8 * 8 + 3 * 8 * 16)
    assert local.model.shape == ModelShape("qwen2", 2, 8, 16, 8, 100, full_attention=True, query_size=8, heads=2)
    [lora] = requests(RunConfig(), CriticSettings(lora=LoraConfig(enabled=True)))
    assert lora.bytes_per_parameter == 4.0
    [sharded] = requests(RunConfig(), CriticSettings(data_parallel=4, sharding="fsdp2"))
    assert sharded.bytes_per_parameter == 16.0 / 4, "its part; what it gathers is the planner's to count"


def test_a_critic_inside_the_actor_has_no_separate_devices_or_memory() -> None:
    [request] = requests(RunConfig(cluster=ClusterConfig(device="cuda")), CriticSettings(trunk="actor"))
    assert (request.embedded_in, request.gpus, request.bytes_per_parameter) == (ACTOR, 0.0, 0.0)


def test_prompts_are_shared_as_the_critics_own_settings_say() -> None:
    [planned] = requests(RunConfig(), CriticSettings())
    assert (planned.shared_prefix, planned.settings) == ("planned", "plugins.critic_engine")
    [named] = requests(RunConfig(), CriticSettings(shared_prefix="cache", data_parallel=2))
    assert (named.shared_prefix, named.engine and named.engine.data_parallel) == ("cache", 2)


def test_on_the_actors_trunk_the_actor_says_whether_activations_are_computed_again() -> None:
    config = RunConfig(actor=EngineConfig(gradient_checkpointing=True, dtype="bfloat16"))
    [inside] = requests(config, CriticSettings(trunk="actor"))
    assert inside.engine is not None
    assert (inside.engine.gradient_checkpointing, inside.engine.dtype) == (True, "bfloat16")
    [separate] = requests(config, CriticSettings())
    assert separate.engine is not None
    assert (separate.engine.gradient_checkpointing, separate.engine.dtype) == (False, "float32")
    with pytest.raises(ConfigError, match=r"shared_prefix=cache: .* actor\.gradient_checkpointing=true"):
        requests(config, CriticSettings(trunk="actor", shared_prefix="cache"))


def test_rounding_is_that_of_the_critics_settings_and_on_the_actors_trunk_of_the_actors_and_the_plan_says_it() -> None:
    actor = EngineConfig(dtype="float16", rounding="nearest")
    for settings, dtype, rounding in (
        (CriticSettings(dtype="bfloat16"), "bfloat16", "stochastic"),
        (CriticSettings(dtype="float16", rounding="nearest"), "float16", "nearest"),
        (CriticSettings(trunk="actor"), "float16", "nearest"),
    ):
        [request] = requests(RunConfig(actor=actor), settings)
        assert request.engine is not None
        assert (request.engine.dtype, request.engine.rounding) == (dtype, rounding)
        assert request.note.endswith(f"; dtype={dtype}: rounding={rounding} of its float32 masters")
    [plain] = requests(RunConfig(), CriticSettings())
    assert "rounding" not in plain.note


def test_flash_attention_needs_a_critic_in_bfloat16() -> None:
    config = RunConfig(model=ModelConfig(attention="flash_attention_2"), actor=EngineConfig(dtype="bfloat16"))
    with pytest.raises(ConfigError, match=r"plugins\.critic_engine\.dtype=float32: .*set .*dtype=bfloat16"):
        requests(config, CriticSettings())
    assert requests(config, CriticSettings(dtype="bfloat16"))
    assert requests(config, CriticSettings(trunk="actor"))


def test_a_separate_pool_is_offered_only_when_the_critic_asks_for_it() -> None:
    config = RunConfig(cluster=ClusterConfig(device="cuda"))
    own, shared = (tuple(requests(config, CriticSettings(own_pool=own))) for own in (True, False))
    assert rlcore_resource_pools(config, own) == [PoolSpec("critic")]
    assert rlcore_resource_pools(config, shared) == []


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"head": "saved"}, "path is empty"),
        ({"trunk": "actor", "own_pool": True}, "own_pool=true"),
        ({"trunk": "actor", "path": "model"}, "has no effect"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        requests(RunConfig(), CriticSettings(**settings))


def test_a_critic_on_the_trunk_of_an_actor_whose_weights_are_in_parts_is_refused() -> None:
    config = RunConfig(actor=EngineConfig(data_parallel=2, sharding="fsdp2"))
    with pytest.raises(ConfigError, match=r"trunk=actor: actor\.sharding=fsdp2 .* set trunk=own"):
        requests(config, CriticSettings(trunk="actor"))
    assert len(requests(config, CriticSettings())) == 1


def test_the_training_engine_gets_every_setting_that_it_has_as_well() -> None:
    kinds = get_type_hints(CriticSettings)
    shared = {field.name for field in fields(EngineConfig)} & kinds.keys() - {"backend", "lora"}
    changed: dict[str, Any] = {"lora": LoraConfig(rank=3)}
    for name in shared:
        start = getattr(CriticSettings(), name)
        others = [choice for choice in get_args(kinds[name]) if choice != start]
        changed[name] = others[0] if others else not start if isinstance(start, bool) else start + 1
    engine = CriticSettings(**changed).engine(EngineConfig())
    assert {name: getattr(engine, name) for name in changed} == changed
    assert "min_lr_ratio" in changed
