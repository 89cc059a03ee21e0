"""Several processes train one critic: values and gradients are those of one, whatever share of the rows each holds."""

import asyncio
import pickle
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from rlcore.cluster.worker_context import cluster_context
from rlcore.contracts.clusters import Cluster, Deadlines
from rlcore.contracts.critic import CriticWorker
from rlcore.data.batch import select
from rlcore.engines.hf import VALUE_HEAD_FILE
from rlcore.plan import Facts, RunPlan, make_plan
from rlcore.plugins import configure
from rlcore.testing.tiny import random_batch, write_tiny_classifier, write_tiny_model
from rlcore.types import Batch, Metrics

KINDS = {
    "whole, shared prompts": (
        "plugins.critic_engine.data_parallel={ranks}",
        "plugins.critic_engine.shared_prefix=tree",
    ),
    "whole, shared out": ("plugins.critic_engine.data_parallel={ranks}", "plugins.critic_engine.sharding={sharding}"),
    "whole, slices": (
        "plugins.critic_engine.data_parallel={ranks}",
        "plugins.critic_engine.context_parallel={slices}",
        "plugins.critic_engine.shared_prefix=tree",
    ),
    "whole, shared out, slices": (
        "plugins.critic_engine.data_parallel={ranks}",
        "plugins.critic_engine.sharding={sharding}",
        "plugins.critic_engine.context_parallel={slices}",
        "plugins.critic_engine.shared_prefix=tree",
    ),
    "head on the actor, slices": (
        "actor.data_parallel={ranks}",
        "actor.context_parallel={slices}",
        "actor.shared_prefix=tree",
        "plugins.critic_engine.shared_prefix=tree",
        "plugins.critic_engine.trunk=actor",
    ),
    "head on the actor": ("actor.data_parallel={ranks}", "plugins.critic_engine.trunk=actor"),
}


@dataclass(frozen=True)
class Found:
    """A critic's results for the batches: values, metrics of the update, and the gradient of each."""

    values: list[npt.NDArray[np.float32]]
    metrics: list[Metrics]
    gradients: list[dict[str, npt.NDArray[np.float32]]]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A saved critic with a random head; the policy is the model below it."""
    from safetensors.numpy import save_file

    directory = write_tiny_model(tmp_path / "tiny")
    rng = np.random.default_rng(0)
    head = {"weight": 0.3 * rng.standard_normal((1, 32)), "bias": np.zeros(1)}
    save_file({name: tensor.astype(np.float32) for name, tensor in head.items()}, directory / VALUE_HEAD_FILE)
    return directory


def planned(model: Path, *overrides: str) -> RunPlan:
    settings = [
        f"model.path={model}",
        "model.tokenizer=bytes",
        "data.sources.all.path=p.jsonl",
        "reward.functions.letters.fn=count_letter",
        "algo.preset=ppo",
        "actor.dtype=float32",  # a trunk's format; a CPU may plan bfloat16, which rounds by the shape of a product
        f"plugins.critic_engine.path={model}",
        "plugins.critic_engine.head=saved",
        "plugins.critic_engine.beta1=0",  # the optimizer's first moment is then the gradient
        "plugins.critic_engine.max_grad_norm=1e9",
        "plugins.critic_engine.lr=1e-6",
        "plugins.critic_engine.micro_batch_tokens=40",
        *overrides,
    ]
    hooks, loaded = configure([], settings, ["null", "critic_engine"])
    return make_plan(loaded, hooks, Facts(cpus=2))


def batches() -> list[Batch]:
    """Twelve rows, five, a whole group, and one, which leaves a rank without any; with random targets."""
    whole, rng = random_batch(num_groups=4, samples=3, seed=5), np.random.default_rng(1)
    mask_BT = whole.tokens.loss_mask_BT
    targets = [np.where(mask_BT, rng.standard_normal(mask_BT.shape), 0).astype(np.float32) for _ in range(2)]
    whole = replace(whole, values_BT=targets[0], returns_BT=targets[1])
    return [whole, *(select(whole, rows) for rows in ([0, 1, 2, 4, 7], [3, 4, 5], [6]))]


def opened(plan: RunPlan, directory: Path) -> Cluster:
    """The cluster that the plan names."""
    return plan.cluster.offer.cls(cluster_context(plan, directory, Deadlines(setup_s=120, call_s=60, close_s=5)))


async def answers_of(plan: RunPlan, directory: Path) -> Found:
    """A critic as the plan wants it, asked for values and updated with every batch."""
    from safetensors.numpy import load_file

    cluster = opened(plan, directory)
    found = Found([], [], [])
    try:
        await cluster.open()
        by_role = {worker.request.role.name: worker for worker in plan.workers}
        if by_role["critic"].request.embedded_in is not None:
            await cluster.start(by_role["actor"])
        critic = (await cluster.start(by_role["critic"])).replicas[0]
        await critic.call(CriticWorker.expect, 100)
        for number, batch in enumerate(batches()):
            found.values.append(await critic.call(CriticWorker.values, batch))
            found.metrics.append(await critic.call(CriticWorker.update, batch))
            saved = directory / str(number)
            await critic.call(CriticWorker.save, saved)
            shards = list((saved / "trainer_state").iterdir())
            if len(shards) == 1:  # not in parts
                tensors = load_file(shards[0])
                found.gradients.append({name: tensor for name, tensor in tensors.items() if "exp_avg" in name})
        await critic.call(CriticWorker.restore, directory / "0")
        found.values.append(await critic.call(CriticWorker.values, batches()[0]))
    finally:
        await cluster.close()
    return found


@pytest.mark.real
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_make_the_update_of_one(model: Path, tmp_path: Path, kind: str) -> None:
    one, two = (
        asyncio.run(answers_of(planned(model, *_with_ranks(KINDS[kind], ranks)), tmp_path / str(ranks)))
        for ranks in (1, 2)
    )
    check_same(one, two, in_parts="shared out" in kind)


@pytest.mark.real
@pytest.mark.timeout(300)
def test_two_ranks_share_out_a_classifier_with_its_head(model: Path, tmp_path: Path) -> None:
    path = write_tiny_classifier(tmp_path / "classifier", of="Token")
    start = (f"plugins.critic_engine.path={path}", "plugins.critic_engine.head=classifier")
    kind = KINDS["whole, shared out"]
    one, two = (
        asyncio.run(answers_of(planned(model, *start, *_with_ranks(kind, ranks)), tmp_path / str(ranks)))
        for ranks in (1, 2)
    )
    check_same(one, two, in_parts=True)


@pytest.mark.real
@pytest.mark.timeout(300)
@pytest.mark.xdist_group("machine")
def test_two_ranks_on_ray_make_the_update_of_one(model: Path, tmp_path: Path) -> None:
    """In a separate process, which leaves Ray with it."""
    pytest.importorskip("ray")
    there = tmp_path / "there"
    command = [sys.executable, __file__, str(model), str(there)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    two = Found(*pickle.loads((there / "found").read_bytes()))
    check_same(asyncio.run(answers_of(planned(model), tmp_path / "here")), two)


def write_what_ray_says(model: Path, directory: Path) -> None:
    """Write the results of two ranks on Ray into the file `found`."""
    ray = ("plugins.ray.object_store_gib=0.1", "cluster.threads=1")
    found = asyncio.run(answers_of(planned(model, "plugins.critic_engine.data_parallel=2", *ray), directory))
    (directory / "found").write_bytes(pickle.dumps((found.values, found.metrics, found.gradients)))


def check_same(one: Found, two: Found, in_parts: bool = False) -> None:
    """Values and updates to 1e-5; of an optimizer whose state was saved in parts the gradients are not compared."""
    for expected, found in zip(one.values, two.values, strict=True):
        assert np.abs(expected).max() > 0.1
        np.testing.assert_allclose(found, expected, atol=1e-5)
    assert len(one.gradients) == len(batches())
    assert len(two.gradients) == (0 if in_parts else len(batches()))
    for left, right in zip(one.gradients, two.gradients or one.gradients, strict=True):
        assert left.keys() == right.keys()
        largest = max(float(np.abs(value).max()) for value in left.values())
        assert largest > 1e-4
        for name, expected in left.items():
            np.testing.assert_allclose(right[name], expected, rtol=1e-5, atol=1e-5 * largest, err_msg=name)
    for before, after in zip(one.metrics, two.metrics, strict=True):
        for name in ("loss", "squared_error", "clip_frac", "grad_norm"):
            assert after.get(f"critic/{name}") == pytest.approx(before.get(f"critic/{name}"), rel=1e-4), name


def _with_ranks(settings: Sequence[str], ranks: int) -> list[str]:
    """The settings for that many; one alone has nothing to share out."""
    return [
        setting.format(ranks=ranks, sharding="fsdp2", slices=2)
        for setting in settings
        if ranks > 1 or not ("{sharding}" in setting or "{slices}" in setting)
    ]


def request_of(plan: RunPlan) -> tuple[int, str, bool]:
    [request] = [worker.request for worker in plan.workers if worker.request.role.name == "critic"]
    return request.ranks, request.pool, request.embedded_in is not None


def test_a_critic_has_separate_ranks_or_those_of_its_actor(model: Path) -> None:
    assert request_of(
        planned(model, "plugins.critic_engine.data_parallel=2", "plugins.critic_engine.own_pool=true")
    ) == (
        2,
        "critic",
        False,
    )
    assert request_of(planned(model, "actor.data_parallel=3", "plugins.critic_engine.trunk=actor")) == (3, "main", True)


if __name__ == "__main__":
    write_what_ray_says(Path(sys.argv[1]), Path(sys.argv[2]))
