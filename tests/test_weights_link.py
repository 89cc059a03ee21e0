"""Weights that go from the actor's process to a replica's: the link itself, who is told what, and what is refused."""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rlcore.actor import ActorWorker
from rlcore.cluster.weights import WeightsLink
from rlcore.errors import ConfigError, PlanError, WorkerError
from rlcore.launch import configure
from rlcore.plan import RunPlan, make_plan
from rlcore.plan.facts import Facts
from rlcore.rollout import RolloutWorker
from rlcore.testing import write_prompts
from rlcore.testing.tiny import write_tiny_model
from rlcore.types import WeightsHandle

torch = pytest.importorskip("torch")
link = pytest.importorskip("rlcore.backends.link")
CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def _what_torch_opens_once() -> None:
    """A pipe of the first store of a process stays open."""
    link.Offer("127.0.0.1", CPU)


def some_tensors() -> dict[str, Any]:
    """Of several types and sizes, some not in one piece, some without a number."""
    return {
        "matrix": torch.randn(30, 7),
        "long": torch.arange(7),
        "number": torch.tensor(2.5),
        "half": torch.randn(11, 3).bfloat16(),
        "none": torch.empty(0, 4),
        "turned": torch.randn(6, 4).T,
        "parameter": torch.nn.Parameter(torch.randn(300)),
    }


@pytest.mark.parametrize("message_bytes", [1, 256, 1 << 20])
@pytest.mark.parametrize("num", [1, 2])
def test_every_worker_of_an_engine_gets_every_tensor(
    num: int, message_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "MESSAGE_BYTES", message_bytes)
    tensors = some_tensors()
    with ThreadPoolExecutor() as threads:
        offer = link.Offer("127.0.0.1", CPU)
        assert offer.address.startswith("127.0.0.1:")
        taken = [
            threads.submit(lambda rank: dict(link.received(offer.address, rank, num, CPU)), rank) for rank in range(num)
        ]
        offer.send(tensors)
        for each in taken:
            found = each.result()
            assert list(found) == list(tensors)
            assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
            assert all(found[name].dtype == tensor.dtype for name, tensor in tensors.items())


def test_a_sender_to_whom_nobody_comes_and_a_receiver_whom_nobody_answers_give_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link, "MEET_S", 0.5)
    offer = link.Offer("127.0.0.1", CPU)
    with pytest.raises(WorkerError, match=f"weights: sending them from {offer.address}: "):
        offer.send(some_tensors())
    address, offer = offer.address, None
    with pytest.raises(WorkerError, match=f"weights: receiving them from {address}: "):
        next(link.received(address, 0, 1, CPU))


def test_a_sender_notices_a_receiver_that_is_gone_halfway(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "MESSAGE_BYTES", 1)
    monkeypatch.setattr(link, "EXCHANGE_S", 2.0)
    offer = link.Offer("127.0.0.1", CPU)

    def take_one() -> str:
        tensors = link.received(offer.address, 0, 1, CPU)
        name = next(tensors)[0]
        tensors.close()
        return str(name)

    with ThreadPoolExecutor() as threads:
        taken = threads.submit(take_one)
        with pytest.raises(WorkerError, match="weights: sending them from"):
            offer.send(some_tensors())
        assert taken.result() == "matrix"


def test_a_sender_hears_of_a_receiver_that_fails_with_the_last_tensor() -> None:
    tensors = some_tensors()
    offer = link.Offer("127.0.0.1", CPU)
    assert not offer.is_awaited

    def take_all_and_fail() -> None:
        received = link.received(offer.address, 0, 1, CPU)
        for _ in tensors:
            next(received)
        received.close()

    with ThreadPoolExecutor() as threads:
        taken = threads.submit(take_all_and_fail)
        with pytest.raises(WorkerError, match="could not take them up"):
            offer.send(tensors)
        taken.result()


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("Llama", {}),
        ("Llama", {"tie_word_embeddings": True}),
        (
            "Qwen2Moe",
            {
                "num_experts": 4,
                "moe_intermediate_size": 16,
                "shared_expert_intermediate_size": 16,
                "num_key_value_heads": 4,
            },
        ),
    ],
)
def test_what_is_sent_is_what_would_be_written(architecture: str, settings: Mapping[str, Any], tmp_path: Path) -> None:
    """Also of models whose weights transformers holds under other names than its files, and in other tensors."""
    from safetensors.torch import load_file

    from rlcore.backends.hf.model import ModelKind, load_model
    from rlcore.backends.hf.state import save_whole, whole_tensors
    from rlcore.config import ModelConfig

    base = write_tiny_model(tmp_path / "tiny", architecture, **settings)
    model = load_model(ModelKind.CAUSAL_LM, ModelConfig(path=str(base)), dtype="float32", device="cpu")
    save_whole(model, tmp_path / "whole")
    written, sent = load_file(tmp_path / "whole" / "model.safetensors"), whole_tensors(model)
    assert sent.keys() == written.keys()
    assert all(torch.equal(sent[name], tensor) for name, tensor in written.items())


class Actor:
    """Its replica, as the controller sees it: offers what it has, sends what it has offered."""

    name = "actor[0]"

    def __init__(self) -> None:
        self.is_published, self.is_awaited = True, False
        self.sent: list[int] = []
        self.send: Callable[[int], None] = self.sent.append
        self.has_sent = asyncio.Event()
        self._offered = 0

    @property
    def replicas(self) -> "list[Actor]":
        return [self]

    async def call(self, method: Any, *args: Any) -> Any:
        await asyncio.sleep(0)
        if method is ActorWorker.offer_weights:
            (self._offered,), self.is_awaited, self.has_sent = args, False, asyncio.Event()
            return WeightsHandle(self._offered, "link", "127.0.0.1:1") if self.is_published else None
        if method is ActorWorker.weights_awaited:
            return self.is_awaited
        assert method is ActorWorker.send_weights
        assert self.is_awaited, "nothing else could the actor do until somebody comes"
        self.has_sent.set()
        return self.send(self._offered)


class Replica:
    """Takes up what it is handed, unless it is dead."""

    def __init__(self, name: str, actor: Actor) -> None:
        self.name, self.alive, self.returns = name, True, True
        self.versions: list[int] = []
        self._actor = actor

    async def call(self, method: Any, handle: WeightsHandle) -> int:
        assert method is RolloutWorker.load_weights
        await asyncio.sleep(0.05)
        if not self.returns:
            self.alive = False
            raise WorkerError(f"{self.name}: its engine ended")
        self._actor.is_awaited = True
        await self._actor.has_sent.wait()
        self.versions.append(handle.version)
        return handle.version


class Rollout:
    """Two replicas."""

    def __init__(self, actor: Actor) -> None:
        self.replicas = [Replica("rollout[0]", actor), Replica("rollout[1]", actor)]

    def before_return(self, prepare: Callable[[Any], Any]) -> None:
        self.prepare = prepare


@pytest.fixture
def parts() -> tuple[Actor, Rollout, WeightsLink]:
    actor = Actor()
    rollout = Rollout(actor)
    return actor, rollout, WeightsLink(actor, rollout)  # type: ignore[arg-type]


def test_each_replica_gets_each_version_and_one_that_is_lost_harms_no_other(parts: Any) -> None:
    actor, rollout, weights = parts
    lost, other = rollout.replicas

    async def use() -> None:
        await weights.publish(1)
        lost.returns = False
        await weights.publish(2)
        assert (lost.versions, other.versions) == ([1], [1, 2])
        lost.returns = True
        await rollout.prepare(lost)
        assert lost.versions == [1, 2]
        assert actor.sent == [1, 1, 2, 2], "to each replica that came"

    asyncio.run(use())


def test_a_replica_that_comes_back_while_weights_change_waits_for_the_next_version(parts: Any) -> None:
    actor, rollout, weights = parts
    back, other = rollout.replicas

    async def use() -> None:
        await rollout.prepare(back)
        assert back.versions == [], "it has read the weights that the run began with"
        await weights.publish(1)
        actor.is_published, back.alive = False, False
        waiting = asyncio.create_task(rollout.prepare(back))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not waiting.done()
        with pytest.raises(WorkerError, match=r"actor\[0\]: it has others by now than version 2"):
            await weights.publish(2)
        actor.is_published = True
        await weights.publish(2)
        await asyncio.wait_for(waiting, 5)
        assert (back.versions, other.versions) == ([1, 2], [1, 2])

    asyncio.run(use())


def test_errors_of_the_actor_and_of_a_replica_that_lives_end_the_handover(parts: Any) -> None:
    actor, rollout, weights = parts

    def fail(version: int) -> None:
        raise WorkerError("actor[0].send_weights(): weights: sending them: it broke")

    async def use() -> None:
        actor.send = fail
        with pytest.raises(WorkerError, match="it broke"):
            await weights.publish(1)
        rollout.replicas[0].returns = False  # it is dead, and that is why
        rollout.replicas[1].alive = False
        await weights.publish(1)

    asyncio.run(use())


def settings(directory: Path) -> dict[str, Any]:
    """A plan with vLLM and a link."""
    base = write_tiny_model(directory / "tiny")
    prompts = write_prompts(directory / "prompts.jsonl", 8)
    return {
        "model": {"path": str(base), "tokenizer": "bytes"},
        "data": {"sources": {"train": {"path": str(prompts)}}},
        "rollout": {"backend": "vllm", "weights": "link"},
        "reward": {"functions": {"letters": {"fn": "count_letter"}}},
    }


@pytest.mark.parametrize(
    ("error", "overrides", "says"),
    [
        (PlanError, ("actor.lora.enabled=true", "rollout.vllm.lora=adapter"), "choose weights=files, or lora=merged"),
        (ConfigError, ("rollout.weights_dir=/dev/shm",), "rollout.weights_dir"),
        (PlanError, ("rollout.backend=hf",), "the rollout is served inside 'actor'"),
        (
            PlanError,
            (
                "cluster.device=cuda",
                "cluster.train_pool=train",
                "cluster.pools.train.union_of=[rollout]",
            ),
            "actor and rollout share a GPU of pool 'rollout'",
        ),
    ],
)
def test_plans_in_which_there_can_be_no_link_are_refused(
    error: type[Exception], overrides: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    def planned(*overrides: str) -> RunPlan:
        hooks, loaded = configure([settings(tmp_path)], overrides, ("null",))
        return make_plan(loaded, hooks, Facts(cpus=2, gpus=2))

    assert planned("cluster.device=cuda").config.rollout.weights == "link"
    with pytest.raises(error, match=says):
        planned(*overrides)
