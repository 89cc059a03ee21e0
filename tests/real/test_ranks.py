"""Several processes train one model: their gradient is that of one process, whatever share of the rows each holds."""

import asyncio
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlcore.cluster.local import LocalCluster
from rlcore.cluster.worker_context import cluster_context
from rlcore.contracts.clusters import Deadlines
from rlcore.data.batch import select
from rlcore.engines.hf.train.ranks import balanced
from rlcore.errors import WorkerError
from rlcore.plan import Facts, RunPlan, make_plan
from rlcore.plugins import configure
from rlcore.testing.packages import importable, write_package
from rlcore.testing.tiny import random_batch, write_tiny_model
from rlcore.types import Batch

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

SOURCE = """
    from dataclasses import replace
    from rlcore.contracts.actor import ActorWorker
    from rlcore.engines.hf.worker import HfActor
    from rlcore.contracts.hooks import hookimpl
    from rlcore.contracts.offers import *; from rlcore.contracts.components import *
    from rlcore.config.providers import *

    def whole(tensor):
        return getattr(tensor, "full_tensor", lambda: tensor)()

    class Open(ActorWorker):
        def gradients(self, batch): ...
        def parameters(self): ...
        def rounded(self): ...
        def skip_rows(self): ...
        def compile_layers(self): ...
        def fail_alone(self, rank): ...

    class OpenActor(HfActor, Open):
        def gradients(self, batch):
            self.engine.expect(100)
            found = self.engine._accumulate(batch, self.engine._taught(batch))
            grads = [whole(master.grad).numpy().copy() for master in self.engine._optimizer.masters]
            self.engine._optimizer.clear_gradients()
            return found.loss, found.result(), grads

        def skip_rows(self):
            from rlcore.engines.hf.train.policy_loss import taught_rows

            self.engine._taught_rows = taught_rows

        def compile_layers(self):
            from rlcore.engines.hf.train.compiled import CompiledLayers

            model = self.engine.model
            model.compiled = CompiledLayers(model.transformer, "aot_eager")

        def parameters(self):
            with self.engine.whole():
                return [parameter.detach().clone().numpy() for parameter in self.engine.model.parameters()]

        def rounded(self):
            optimizer = self.engine._optimizer
            masters = [whole(master).detach().float().numpy() for master in optimizer.masters]
            with self.engine.whole():
                return [weight.detach().clone().float().numpy() for weight in self.engine.model.parameters()], masters

        def fail_alone(self, rank):
            if self.context.rank == rank:
                raise ValueError("only here")

    @hookimpl
    def rlcore_agent_loops():
        def asks(config, section):
            common = dict(
                threads=1,
                targets={"policy_loss": "rlcore.algo.loss:clip"},
                engine=config.actor,
                shared_prefix=config.actor.shared_prefix,
            )
            return [
                WorkerRequest(Role("one", Open), "open", **common),
                WorkerRequest(Role("two", Open), "open", ranks=2, **common),
            ]
        return [Component("open", lambda context: None, asks)]

    @hookimpl
    def rlcore_worker_classes():
        return [WorkerClass(Open, "open", OpenActor)]
"""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Path]:
    """A directory from which the test's plugin is imported."""
    with importable(tmp_path / "site") as directory:
        write_package(directory, "open_ranks", SOURCE)
        yield directory


def planned(model: Path, *overrides: str) -> RunPlan:
    """A run with one worker of one rank and one of two."""
    settings = [
        f"model.path={model}",
        "model.tokenizer=bytes",
        "data.sources.all.path=p.jsonl",
        "reward.functions.letters.fn=count_letter",
        "rollout.agent=open",
        *overrides,
    ]
    hooks, loaded = configure([], settings, ["null", "open_ranks"])
    return make_plan(loaded, hooks, Facts(cpus=2))


def batches() -> dict[str, Batch]:
    """Mini-batches by what is special about them."""
    whole = random_batch(num_groups=4, samples=3, seed=5)
    return {
        "twelve": whole,
        "five": select(whole, [0, 1, 2, 4, 7]),
        "one": select(whole, [6]),
        "a whole group": select(whole, [3, 4, 5]),
    }


SHARDED = ("actor.data_parallel=2", "actor.sharding=fsdp2", "actor.shared_prefix=tree")
KINDS = {
    "none": ("actor.shared_prefix=none",),
    "tree": ("actor.shared_prefix=tree",),
    "cache": ("actor.shared_prefix=cache",),
    "sharded": SHARDED,
    "sharded, compiled": (*SHARDED, "actor.gradient_checkpointing=true"),
    "sharded, checkpointed, lora": (*SHARDED, "actor.gradient_checkpointing=true", "actor.lora.enabled=true"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_have_the_gradient_of_one(site: Path, tmp_path: Path, kind: str) -> None:
    settings = KINDS[kind]
    model = write_tiny_model(tmp_path / "tiny", tie_word_embeddings=settings == SHARDED)
    plan = planned(model, "actor.micro_batch_tokens=40", *settings)
    Open = sys.modules["open_ranks"].Open

    async def story() -> None:
        cluster = LocalCluster(cluster_context(plan, tmp_path, Deadlines(setup_s=120, call_s=60, close_s=5)))
        try:
            ours = [worker for worker in plan.workers if worker.asked_by != "core"]
            one, two = [(await cluster.start(worker)).replicas[0] for worker in ours]
            if "compiled" in kind:
                await two.call(Open.compile_layers)
            for name, batch in batches().items():
                expected: Any = await one.call(Open.gradients, batch)
                found: Any = await two.call(Open.gradients, batch)
                for left, right in zip(expected[2], found[2], strict=True):
                    np.testing.assert_allclose(right, left, rtol=1e-5, atol=1e-5 * np.abs(left).max(), err_msg=name)
                assert found[0] == pytest.approx(expected[0], rel=1e-5)
                assert found[1] == pytest.approx(expected[1], rel=1e-4)
                logprobs = [await run.call(Open.logprobs, batch) for run in (one, two)]
                np.testing.assert_allclose(logprobs[1], logprobs[0], atol=1e-5)
            norms = [(await run.call(Open.update, replace(batches()["five"])))["actor/grad_norm"] for run in (one, two)]
            assert norms[1] == pytest.approx(norms[0], rel=1e-5)
            weights = [await run.call(Open.parameters) for run in (one, two)]
            assert max(float(np.abs(a - b).max()) for a, b in zip(*weights, strict=True)) < 1e-6
            with pytest.raises(WorkerError, match=r"two\[0\]\.fail_alone\(\): ValueError: only here"):
                await two.call(Open.fail_alone, 1)
        finally:
            await cluster.close()

    asyncio.run(story())


@pytest.mark.parametrize("settings", [KINDS["tree"], SHARDED], ids=["none", "fsdp2"])
def test_ranks_that_skip_rows_have_the_gradient_of_one_that_computes_all(
    site: Path, tmp_path: Path, settings: tuple[str, ...]
) -> None:
    """Each exchange of one rank meets that of the other: also where one of them, or both, have nothing to compute."""
    model = write_tiny_model(tmp_path / "tiny")
    plan = planned(model, "actor.micro_batch_tokens=40", "actor.lr=1e-3", "actor.weight_decay=0.1", *settings)
    Open = sys.modules["open_ranks"].Open
    advantages_B = np.array(random_batch(num_groups=4, samples=3, seed=5).advantages_B)
    taught = {"some": [0, 1, 2, 6, 7, 8], "one": [4], "none": []}
    cases = {
        name: replace(batches()["twelve"], advantages_B=np.where(np.isin(np.arange(12), rows), advantages_B, 0.0))
        for name, rows in taught.items()
    }

    async def story() -> None:
        cluster = LocalCluster(cluster_context(plan, tmp_path, Deadlines(setup_s=120, call_s=60, close_s=5)))
        try:
            ours = [worker for worker in plan.workers if worker.asked_by != "core"]
            one, two = [(await cluster.start(worker)).replicas[0] for worker in ours]
            await two.call(Open.skip_rows)
            for name, batch in cases.items():
                expected: Any = await one.call(Open.gradients, batch)
                found: Any = await two.call(Open.gradients, batch)
                for left, right in zip(expected[2], found[2], strict=True):
                    np.testing.assert_allclose(right, left, rtol=1e-5, atol=1e-5 * np.abs(left).max(), err_msg=name)
                assert found[0] == pytest.approx(expected[0], rel=1e-5), name
            for name, batch in cases.items():
                metrics: Any = [await run.call(Open.update, batch) for run in (one, two)]
                assert metrics[1]["actor/rows_skipped_frac"] == pytest.approx(1.0 - len(taught[name]) / 12)
                assert "actor/rows_skipped_frac" not in metrics[0]
            weights = [await run.call(Open.parameters) for run in (one, two)]
            assert max(float(np.abs(a - b).max()) for a, b in zip(*weights, strict=True)) < 1e-5
        finally:
            await cluster.close()

    asyncio.run(story())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("settings", [("actor.data_parallel=2",), SHARDED], ids=["none", "fsdp2"])
def test_ranks_round_the_masters_of_half_precision_as_one_process_would(
    site: Path, tmp_path: Path, settings: tuple[str, ...], dtype: str
) -> None:
    """Masters start from the numbers in the files, and the same master gives the same bits on any number of ranks."""
    import torch

    from rlcore.engines.hf.train.model import ModelKind, load_model
    from rlcore.engines.hf.train.rounding import RoundingKey, publish

    model = write_tiny_model(tmp_path / "tiny")
    plan = planned(model, "actor.micro_batch_tokens=40", f"actor.dtype={dtype}", "actor.lr=1e-3", *settings)
    Open = sys.modules["open_ranks"].Open
    stored = load_model(ModelKind.CAUSAL_LM, plan.config.model, dtype="float32", device="cpu")

    async def story() -> None:
        cluster = LocalCluster(cluster_context(plan, tmp_path, Deadlines(setup_s=120, call_s=60, close_s=5)))
        try:
            ours = [worker for worker in plan.workers if worker.asked_by != "core"]
            for replica in [(await cluster.start(worker)).replicas[0] for worker in ours]:
                found: Any = await replica.call(Open.rounded)
                for master, exact in zip(found[1], stored.parameters(), strict=True):
                    assert np.array_equal(master, exact.detach().numpy())
                for update in range(2):
                    await replica.call(Open.update, batches()["twelve"])
                    weights, masters = await replica.call(Open.rounded)
                    for index, (weight, master) in enumerate(zip(weights, masters, strict=True)):
                        expected = torch.zeros(master.shape, dtype=getattr(torch, dtype))
                        key = RoundingKey(plan.config.train.seed, update, index)
                        publish(expected, torch.tensor(master), "stochastic", key)
                        assert np.array_equal(expected.float().numpy(), weight), (replica.name, index)
        finally:
            await cluster.close()

    asyncio.run(story())


@pytest.mark.parametrize("settings", [SHARDED, (*SHARDED, "actor.lora.enabled=true")], ids=["whole", "lora"])
def test_a_sharded_checkpoint_of_two_ranks_resumes_as_one_process_and_as_two(
    site: Path, tmp_path: Path, settings: tuple[str, ...]
) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    plan = planned(model, "actor.lr=1e-3", *settings)
    Open = sys.modules["open_ranks"].Open
    first, then = random_batch(seed=5), random_batch(seed=6)

    async def story() -> None:
        cluster = LocalCluster(cluster_context(plan, tmp_path, Deadlines(setup_s=120, call_s=60, close_s=5)))
        try:
            ours = [worker for worker in plan.workers if worker.asked_by != "core"]
            one, two = [(await cluster.start(worker)).replicas[0] for worker in ours]
            for run in (one, two):
                await run.call(Open.expect, 100)
            await two.call(Open.update, first)
            await two.call(Open.save, tmp_path / "two")
            await one.call(Open.restore, tmp_path / "two")
            ends = {}
            for name, value in (("uninterrupted", two), ("as one", one)):
                await value.call(Open.update, then)
                ends[name] = await value.call(Open.parameters)
            await one.call(Open.save, tmp_path / "one")
            await two.call(Open.restore, tmp_path / "two")
            await two.call(Open.update, then)
            ends["as two"] = await two.call(Open.parameters)
            await two.call(Open.restore, tmp_path / "one")
            ends["one as two"] = await two.call(Open.parameters)
            for name, value in (("from one", one), ("from two", two)):
                await value.call(Open.weights, 2, tmp_path / name)
        finally:
            await cluster.close()
        assert [np.array_equal(*value) for value in zip(ends["uninterrupted"], ends["as two"], strict=True)].count(
            False
        ) == 0
        assert [np.array_equal(*value) for value in zip(ends["as one"], ends["one as two"], strict=True)].count(
            False
        ) == 0
        # Without the moments that were saved, Adam's step would be another by about lr = 1e-3.
        assert (
            max(float(np.abs(a - b).max()) for a, b in zip(ends["uninterrupted"], ends["as one"], strict=True)) < 1e-5
        )

    asyncio.run(story())
    from_one, from_two = (handed_over(tmp_path / name) for name in ("from one", "from two"))
    assert from_one.keys() == from_two.keys()
    assert [name for name, tensor in from_one.items() if not np.array_equal(tensor, from_two[name])] == []
    for kind, num in (("one", 1), ("two", 2)):
        shards = sorted(path.name for path in (tmp_path / kind / "trainer_state").iterdir())
        assert shards == [f"shard-{part:05d}-model-00001-of-00001.safetensors" for part in range(1, num + 1)]
        assert (tmp_path / kind / "trainer_state.json").is_file()


def handed_over(directory: Path) -> dict[str, Any]:
    """The weights in a directory, by name."""
    from safetensors.numpy import load_file

    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_rows_are_dealt_out_by_tokens_and_groups_stay_whole() -> None:
    lengths_B = np.array([10, 1, 1, 1, 9, 2])
    alone_B = balanced(lengths_B, np.arange(6), 2)
    assert sorted(np.bincount(alone_B, lengths_B).tolist()) == [12.0, 12.0]
    groups_B = np.array([0, 0, 1, 1, 2, 2])
    ranks_B = balanced(lengths_B, groups_B, 2)
    assert all(len(set(ranks_B[groups_B == group].tolist())) == 1 for group in range(3))
    assert sorted(np.bincount(ranks_B, lengths_B).tolist()) == [11.0, 13.0]
    assert balanced(np.array([7]), np.array([0]), 3).tolist() == [0]
