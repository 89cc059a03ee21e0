"""The cache of an actor or a reference on a device is freed before a server that shares it starts or wakes up.

The allocator is a fake one: whatever computes fills its cache.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.cluster.worker_context import cluster_context, context_of
from rlcore.contracts.clusters import Deadlines
from rlcore.engines import freed_memory
from rlcore.engines.hf import worker as workers
from rlcore.engines.hf.train import engine as engines
from rlcore.engines.hf.train import offload
from rlcore.engines.hf.train.engine import TrainEngine
from rlcore.engines.hf.worker import HfActor, HfReference
from rlcore.plan import Facts, make_plan
from rlcore.plugins import configure
from rlcore.testing import write_prompts
from rlcore.testing.tiny import random_batch, write_tiny_model

torch.set_num_threads(1)
BATCH = random_batch(seed=1)


class Cache:
    """Names what has filled it since it was freed."""

    def __init__(self) -> None:
        self.filled_by: list[str] = []

    def filling(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """The method, which fills the cache."""

        def fill(*arguments: Any, **named: Any) -> Any:
            try:
                return method(*arguments, **named)
            finally:
                self.filled_by.append(name)

        return fill

    def free(self, device: str) -> None:
        """In the place of `yield_device`."""
        assert device == "cpu"
        self.filled_by.clear()


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> Cache:
    cache = Cache()
    for name in ("_accumulate", "restore", "named_weights", "save_whole"):
        monkeypatch.setattr(TrainEngine, name, cache.filling(name, getattr(TrainEngine, name)))
    monkeypatch.setattr(engines, "score", cache.filling("score", engines.score))
    for module in (freed_memory, workers, offload):
        monkeypatch.setattr(module, "yield_device", cache.free)
    return cache


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., Any]:
    """Starts an actor, or the reference of a run with one."""
    write_tiny_model(tmp_path / "tiny")
    prompts = write_prompts(tmp_path / "prompts.jsonl", 8)

    def started(cls: type[Any] = HfActor, *overrides: str) -> Any:
        settings = [
            f"model.path={tmp_path / 'tiny'}",
            "model.tokenizer=bytes",
            f"data.sources.all.path={prompts}",
            "reward.functions.letters.fn=count_letter",
            "rollout.backend=null_replica",
            *overrides,
        ]
        hooks, loaded = configure([], settings, ["null"])
        plan = make_plan(loaded, hooks, Facts(cpus=2))
        role = "actor" if cls is HfActor else "reference"
        chosen = next(worker for worker in plan.workers if worker.request.role.name == role)
        made = cls(context_of(cluster_context(plan, tmp_path, Deadlines()), chosen, 0, device="cpu"))
        made.setup()
        return made

    return started


@pytest.mark.slow
def test_an_actor_frees_its_cache_at_start_after_updates_after_passes_and_after_a_restore(
    start: Callable[..., Any], cache: Cache, tmp_path: Path
) -> None:
    actor = start()
    assert cache.filled_by == [], "servers start next"
    actor.begin_updates()
    actor.update(BATCH)
    assert cache.filled_by == ["_accumulate"]
    actor.end_updates()
    assert cache.filled_by == [], "also where the step fails, and nothing is published"
    actor.logprobs(BATCH)
    assert "score" in cache.filled_by
    actor.publish(1)
    assert cache.filled_by == [], "also where the step had passes and no update"
    actor.save(tmp_path / "saved")
    cache.filled_by.append("something")
    actor.restore(tmp_path / "saved")
    assert cache.filled_by == []


@pytest.mark.parametrize("sync", ["tcp", "disk"])
def test_weights_that_were_gathered_are_freed_before_a_rollout_loads_them(
    start: Callable[..., Any], cache: Cache, tmp_path: Path, sync: str
) -> None:
    actor = start()
    object.__setattr__(actor.context, "weights_kind", "tcp" if sync == "tcp" else "directory")
    try:
        actor.weights(1, tmp_path / "weights")
        assert cache.filled_by == []
    finally:
        actor.close()


def test_weights_that_cannot_be_handed_over_are_freed_too(
    start: Callable[..., Any], cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = start()

    def fails(directory: Path) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(actor.engine, "save_whole", cache.filling("gathered", fails))
    object.__setattr__(actor.context, "weights_kind", "directory")
    with pytest.raises(OSError, match="no space left"):
        actor.weights(1, tmp_path / "weights")
    assert cache.filled_by == []


@pytest.mark.parametrize("shares", [True, False])
def test_caches_are_freed_after_each_turn_on_a_device_that_is_shared(
    start: Callable[..., Any], cache: Cache, shares: bool
) -> None:
    reference = start(HfReference, "algo.kl.placement=loss")
    object.__setattr__(reference.context, "shares_device", shares)
    reference.logprobs(BATCH)
    assert ("score" in cache.filled_by) is not shares
    actor = start()
    object.__setattr__(actor.context, "shares_device", shares)
    actor.begin_updates()
    for compute in (actor.logprobs, actor.token_scores, actor.update):
        cache.filled_by.clear()
        compute(BATCH)
        assert bool(cache.filled_by) is not shares, compute
    actor.close()


def test_a_cache_is_freed_on_an_accelerator_only(monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append("cuda"))
    monkeypatch.setattr(freed_memory, "_call_libc", lambda name, *_: freed.append(name))
    freed_memory.yield_device("cpu")
    assert freed == []
    freed_memory.yield_device("cuda:3")
    freed_memory.give_back_freed_memory("cuda:3")
    freed_memory.give_back_freed_memory("cpu")
    assert freed == ["cuda", "cuda", "malloc_trim"]
