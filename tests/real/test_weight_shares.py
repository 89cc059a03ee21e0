"""Weights that the ranks of an actor hand over together, in shared memory (a share of each) or over IPC (all of them
gather, and the rank on the replica's device sends): the same bits."""

import asyncio
import json
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlcore.errors import WorkerError
from rlcore.plugins.planning import plan_run
from rlcore.runtime.launch import launch
from rlcore.testing import write_prompts
from rlcore.testing.null import SETTINGS
from rlcore.testing.tiny import write_tiny_model

pytestmark = [pytest.mark.real, pytest.mark.timeout(240), pytest.mark.xdist_group("machine")]

READER = '''
"""Rollouts that write down what they received, one of which dies, and an actor whose second rank has no memory left."""
RLCORE_API = "1"

import hashlib, json, os, signal

import torch

from rlcore import WorkerClass, hookimpl
from rlcore.contracts.actor import ActorWorker
from rlcore.contracts.rollout import RolloutWorker
from rlcore.contracts.weights import weights_of
from rlcore.engines import memory_server
from rlcore.engines.hf.worker import HfActor


def no_space(*_):
    raise OSError(28, "No space left on device")


class Poor(HfActor):
    def weights(self, version, directory):
        if self.context.rank == 1 and version == 2:
            memory_server.os.posix_fallocate = no_space
            self._server = None  # new memory
        return super().weights(version, directory)


class Reader(RolloutWorker):
    def setup(self):
        pass

    async def load_weights(self, handle):
        found = []
        for name, tensor in weights_of(handle, borrowed=True):
            digest = hashlib.sha256(tensor.flatten().view(torch.uint8).numpy()).hexdigest()
            found.append([name, str(tensor.dtype), list(tensor.shape), digest])
            self.received(handle.version)
        name = f"read {handle.version}{'' if self.context.replica == 0 else ' by ' + str(self.context.replica)}.json"
        (self.context.run_dir / name).write_text(json.dumps([handle.path, found]))
        return handle.version

    def received(self, version):
        pass

    async def sleep(self):
        pass

    async def wake(self):
        pass

    async def generate(self, requests):
        for _ in ():
            yield _


class Mortal(Reader):
    """Its second replica is killed with the first weight of version 2."""

    def received(self, version):
        killed = self.context.run_dir / "killed"
        if version == 2 and self.context.replica == 1 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)


@hookimpl
def rlcore_worker_classes():
    ways = frozenset({"disk", "ipc", "shm", "tcp"})
    return [
        WorkerClass(RolloutWorker, "reader", Reader, isolated=True, weight_sync=ways),
        WorkerClass(RolloutWorker, "mortal", Mortal, isolated=True, weight_sync=ways),
        WorkerClass(ActorWorker, "poor", Poor),
    ]
'''


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("shares")
    (found / "reader.py").write_text(READER)
    write_tiny_model(found / "tiny", num_hidden_layers=3)
    return found


OVER_IPC = [
    "rollout.weight_sync=ipc",
    "rollout.weights_bucket_mib=1",
    "rollout.pool=main",
    "cluster.train_pool=train",
    "cluster.pools.train.colocates=[main]",
]


def received(directory: Path, name: str, *overrides: str) -> tuple[str, list[list[Any]]]:
    """The place of the second version that an actor of two ranks hands over, and what the rollout received."""
    settings = [
        *(setting for setting in SETTINGS if not setting.startswith(("model.", "data.", "actor.", "rollout."))),
        f"model.path={directory / 'tiny'}",
        "model.tokenizer=bytes",
        f"data.sources.all.path={write_prompts(directory / 'prompts.jsonl', 8)}",
        "rollout.backend=reader",
        "rollout.check_weights_every=0",
        "rollout.weight_sync=shm",
        "actor.data_parallel=2",
        "train.prompts_per_step=2",
        *overrides,
    ]
    run_dir = directory / name
    run_dir.mkdir()

    async def hand_over() -> None:
        async with launch(plan_run([], settings, ("null", str(directory / "reader.py"))), run_dir) as run:
            for version in (1, 2):
                await run.publish(version)
            while len(list(run_dir.glob("read 2*.json"))) < run.plan.config.rollout.replicas:  # one may be restarting
                await asyncio.sleep(0.1)

    asyncio.run(hand_over())
    place, found = json.loads((run_dir / "read 2.json").read_text())
    return place, sorted(found)


@pytest.mark.parametrize(
    ("name", "parts", "dtype", "overrides"),
    [
        ("copies", 2, "bfloat16", ["actor.dtype=bfloat16"]),
        ("shards", 2, "float32", ["actor.sharding=fsdp2"]),
        ("adapter", 1, "float32", ["actor.sharding=fsdp2", "actor.lora.enabled=true"]),
        ("shards over ipc", 2, "bfloat16", ["actor.sharding=fsdp2", "actor.dtype=bfloat16", *OVER_IPC]),
        ("adapter over ipc", 2, "float32", ["actor.sharding=fsdp2", "actor.lora.enabled=true", *OVER_IPC]),
    ],
)
def test_each_rank_has_an_address_and_the_replica_receives_every_weight_once(
    directory: Path, name: str, parts: int, dtype: str, overrides: Sequence[str]
) -> None:
    place, found = received(directory, name, *overrides)
    assert place.count("rlcore-weights-") == parts
    stored = load_file(directory / "tiny" / "model.safetensors")
    expected = {key: tensor.to(getattr(torch, dtype)) for key, tensor in stored.items()}
    assert found == [
        [key, f"torch.{dtype}", list(tensor.shape), sha256(tensor.flatten().view(torch.uint8).numpy()).hexdigest()]
        for key, tensor in sorted(expected.items())
    ]


def test_a_rank_without_memory_for_its_share_ends_the_hand_over_in_a_line(directory: Path) -> None:
    line = r"^actor\[0\]\.weights\(\): weights: .* MiB of shared memory cannot be had for model\."
    with pytest.raises(WorkerError, match=line):
        received(directory, "poor", "actor.backend=poor")
    assert (directory / "poor" / "read 1.json").exists()
    assert not (directory / "poor" / "read 2.json").exists()


def test_a_replica_that_dies_in_the_middle_gets_the_version_when_it_returns(directory: Path) -> None:
    """The actor keeps no copy of a version, so it sends the version again."""
    more = ("actor.sharding=fsdp2", "rollout.backend=mortal", "rollout.replicas=2")
    _, found = received(directory, "mortal", *OVER_IPC, *more)
    assert (directory / "mortal" / "killed").exists()
    again = json.loads((directory / "mortal" / "read 2 by 1.json").read_text())[1]
    assert sorted(again) == found
    assert len(found) > 10
