"""The reference on several ranks says what one process says, and inside a LoRA actor what a second model says."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlcore.cluster.local import LocalCluster
from rlcore.cluster.worker_context import cluster_context
from rlcore.contracts.actor import ActorWorker
from rlcore.contracts.clusters import Deadlines
from rlcore.contracts.reference import ReferenceSlices, ReferenceWorker
from rlcore.data.batch import select
from rlcore.plan import Facts, RunPlan, make_plan
from rlcore.plugins import configure
from rlcore.testing.tiny import random_batch, write_tiny_model
from rlcore.types import Batch, Float32s

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

LORA = ("actor.lora.enabled=true", "actor.lora.rank=4", "actor.lr=0.01")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", num_key_value_heads=2)


def planned(model: Path, *overrides: str) -> RunPlan:
    settings = [
        f"model.path={model}",
        "model.tokenizer=bytes",
        "data.sources.all.path=p.jsonl",
        "reward.functions.letters.fn=count_letter",
        "algo.kl.placement=loss",
        "rollout.temperature=0.8",
        "reference.micro_batch_tokens=40",
        "cluster.threads=1",
        *overrides,
    ]
    hooks, loaded = configure([], settings, ["null"])
    return make_plan(loaded, hooks, Facts(cpus=2))


def batches() -> list[Batch]:
    """Twelve rows, five, and one, which leaves a rank without any."""
    whole = random_batch(num_groups=4, samples=3, seed=5)
    return [whole, select(whole, [0, 1, 2, 4, 7]), select(whole, [6])]


def logprobs_of(plan: RunPlan, directory: Path, trains: bool = False) -> tuple[list[Float32s], list[Float32s]]:
    """The log-probs of the batches by the plan's reference and by its actor, after three updates if it trains."""

    async def story() -> tuple[list[Float32s], list[Float32s]]:
        cluster = LocalCluster(cluster_context(plan, directory, Deadlines(setup_s=120, call_s=60, close_s=5)))
        workers = {worker.request.role.name: worker for worker in plan.workers}
        try:
            await cluster.open()
            actor: Any = (await cluster.start(workers["actor"])).replicas[0]
            reference: Any = (await cluster.start(workers["reference"])).replicas[0]
            await actor.call(ActorWorker.expect, 100)
            for _ in range(3 if trains else 0):
                frozen = await reference.call(ReferenceWorker.logprobs, batches()[0])
                await actor.call(ActorWorker.update, replace(batches()[0], reference_logprobs_BT=frozen))
            return (
                [await reference.call(ReferenceWorker.logprobs, batch) for batch in batches()],
                [await actor.call(ActorWorker.logprobs, batch) for batch in batches()],
            )
        finally:
            await cluster.close()

    return asyncio.run(story())


@pytest.mark.parametrize("way", ["none", "tree"])
@pytest.mark.parametrize("sharding", ["none", "fsdp2"])
def test_two_ranks_say_what_one_process_says(model: Path, tmp_path: Path, way: str, sharding: str) -> None:
    shared = f"actor.shared_prefix={way}"
    one, _ = logprobs_of(planned(model, shared), tmp_path)
    two, actor = logprobs_of(
        planned(model, shared, "actor.data_parallel=2", f"actor.sharding={sharding}"), tmp_path, trains=True
    )
    for expected, found, moved in zip(one, two, actor, strict=True):
        assert np.abs(expected).max() > 1.0
        np.testing.assert_allclose(found, expected, atol=1e-6 * np.abs(expected).max())
        assert np.abs(moved - expected).max() > 1e-5, "the actor has moved, and its reference has not"


@pytest.mark.parametrize("heads", [4, 3])
def test_two_ranks_with_slices_say_what_one_process_says_of_another_model(
    model: Path, tmp_path: Path, heads: int
) -> None:
    """Three heads are not divided among two ranks, each of which then computes whole sequences."""
    shape = {"num_attention_heads": heads, "num_key_value_heads": 1, "hidden_size": 48, "head_dim": 8}
    other = write_tiny_model(tmp_path / "other", **shape)
    settings = (f"reference.path={other}", "actor.shared_prefix=tree", "actor.sharding=fsdp2")
    sliced = planned(model, *settings, "actor.data_parallel=2", "actor.context_parallel=2")
    [reference] = [worker for worker in sliced.workers if worker.request.role.name == "reference"]
    assert reference.request.spec == ReferenceSlices(2 if heads == 4 else 1)
    one, _ = logprobs_of(planned(model, *settings[:2]), tmp_path)
    two, _ = logprobs_of(sliced, tmp_path)
    for expected, found in zip(one, two, strict=True):
        assert np.abs(expected).max() > 1.0
        np.testing.assert_allclose(found, expected, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("sharding", ["one process", "none", "fsdp2"])
def test_a_lora_actor_with_its_adapter_off_says_what_a_second_model_says(
    model: Path, tmp_path: Path, sharding: str
) -> None:
    ranks = () if sharding == "one process" else ("actor.data_parallel=2", f"actor.sharding={sharding}")
    inside = planned(model, *LORA, *ranks)
    assert (
        next(worker for worker in inside.workers if worker.request.role.name == "reference").request.embedded_in
        is not None
    )
    found, actor = logprobs_of(inside, tmp_path, trains=True)
    second, _ = logprobs_of(planned(model, *LORA, f"reference.path={model}"), tmp_path)
    for expected, here, moved in zip(second, found, actor, strict=True):
        np.testing.assert_allclose(here, expected, rtol=0, atol=1e-6 * np.abs(expected).max() if ranks else 0)
        assert np.abs(moved - expected).max() > 1e-2, "the adapter has learned something"
