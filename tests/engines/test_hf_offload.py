"""`offload` moves state at the right moments and changes no result.

The device is cpu:0 and host memory is cpu, so torch computes with both; a move is seen by its target.
"""

from dataclasses import replace
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from torch import Tensor

from rlcore.algo.loss import clip
from rlcore.config import AlgoConfig, EngineConfig, LoraConfig, ModelConfig
from rlcore.engines.hf import TrainEngine
from rlcore.engines.hf.train import sharded_tensors as parts
from rlcore.engines.hf.train.policy_loss import PolicyLoss
from rlcore.engines.hf.train.state import whole_tensors
from rlcore.testing.tiny import random_batch, write_tiny_model

torch.set_num_threads(1)

BATCHES = [random_batch(seed=seed) for seed in range(4)]
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


class HostMemory:
    """Holds what is moved to the host; the engine is left with tensors of NaN, which no result survives."""

    def __init__(self) -> None:
        self.moves: list[str] = []
        self._held: dict[int, Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes that are here and not on the device."""
        return sum(tensor.nbytes for tensor in self._held.values())

    def moved(self, tensor: Tensor, device: torch.device) -> Tensor:
        to_host = device.index is None
        if to_host == (tensor.data_ptr() in self._held):
            return tensor
        self.moves.append("host" if to_host else "device")
        if not to_host:
            return self._held.pop(tensor.data_ptr())
        hidden = torch.full_like(tensor, float("nan"))
        self._held[hidden.data_ptr()] = tensor
        return hidden

    def order(self) -> list[str]:
        """The moves since the last call; those in a row to one place are one."""
        moves, self.moves = self.moves, []
        return [move for move, _ in groupby(moves)]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> HostMemory:
    memory = HostMemory()
    monkeypatch.setattr(parts, "begin_move", memory.moved)
    return memory


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "llama", num_key_value_heads=2)


def engine_of(path: Path, offload: bool, **settings: Any) -> TrainEngine:
    config = EngineConfig(lr=1e-3, offload=offload, **settings)
    return TrainEngine("causal_lm", ModelConfig(path=str(path)), config, PolicyLoss(clip, AlgoConfig()), device="cpu:0")


KINDS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "lora": {"lora": LoraConfig(enabled=True, rank=2)},
}


@pytest.mark.slow
@pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("stays", [False, True], ids=["weights leave", "weights stay"])
def test_no_result_depends_on_offload(llama: Path, host: HostMemory, settings: dict[str, Any], stays: bool) -> None:
    """Two steps of two updates, with a pass before each: log-probs and metrics bit for bit."""
    found = []
    for offload in (False, True):
        engine, seen = engine_of(llama, offload, **settings), []
        if stays:
            engine.stay_on_device()
        for step in range(2):
            before_BT = engine.logprobs(BATCHES[step])
            engine.begin_updates()
            rows = [engine.update(replace(batch, old_logprobs_BT=engine.logprobs(batch))) for batch in BATCHES[2:]]
            engine.end_updates()
            timeless = [{name: row[name] for name in row if not name.startswith("time/")} for row in rows]
            seen.append((before_BT.tolist(), timeless))
        found.append(seen)
        assert bool(host.moves) is offload
    assert np.isfinite(found[0][1][0]).all()
    assert found[0] == found[1]


def test_weights_are_moved_once_around_the_updates_of_a_step_and_the_state_around_each(
    llama: Path, host: HostMemory
) -> None:
    engine = engine_of(llama, True)
    num_weights = len(list(engine.model.parameters())) + len(list(engine.model.buffers()))
    assert host.order() == ["host"], "it rests from the start"
    engine.begin_updates()
    engine.begin_updates()
    assert len(host.moves) == num_weights
    assert host.order() == ["device"]
    engine.update(BATCHES[0])
    assert host.order() == ["host"], "the moments, which did not exist before"
    for batch in BATCHES[1:]:
        engine.update(batch)
        assert len(host.moves) == 2 * 2 * len(engine._optimizer.parameters), "two moments, to and fro"
        assert host.order() == ["device", "host"]
        engine.logprobs(batch)
        assert host.order() == []
    engine.end_updates()
    assert len(host.moves) == num_weights
    assert host.order() == ["host"]
    engine.logprobs(BATCHES[0])
    assert host.order() == ["device", "host"], "a pass needs the weights"
    engine.update(BATCHES[0])
    assert host.order() == ["device", "host"], "an update outside of a step takes back what it brought"


@pytest.mark.parametrize(
    ("dtype", "bytes_per_parameter"),
    [pytest.param("float32", 8, id="two moments"), pytest.param("bfloat16", 12, id="two moments and the master")],
)
def test_activations_and_optimizer_state_are_never_on_the_device_at_the_same_time(
    llama: Path, host: HostMemory, dtype: str, bytes_per_parameter: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, resting = engine_of(llama, True, dtype=dtype), list[int]()
    passes = TrainEngine._accumulate

    def accumulate(*arguments: Any) -> Any:
        resting.append(host.num_bytes)
        try:
            return passes(*arguments)
        finally:
            resting.append(host.num_bytes)

    monkeypatch.setattr(TrainEngine, "_accumulate", accumulate)
    engine.begin_updates()
    engine.update(BATCHES[0])
    engine.end_updates()
    resting.clear()
    engine.begin_updates()
    engine.update(BATCHES[1])
    state = bytes_per_parameter * engine.facts()["num_parameters"]
    assert resting == [state, state]
    masters = [master for master in engine._optimizer.masters if dtype == "bfloat16"]
    assert all(master.untyped_storage().nbytes() == 4 for master in masters), "the place of a master takes no memory"


def test_what_leaves_an_accelerator_is_copied_to_pinned_memory_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no accelerator: the copy is recorded."""
    made: list[dict[str, Any]] = []

    class Pinned:
        def copy_(self, source: Any, non_blocking: bool = False) -> Any:
            made.append({"from": source, "non_blocking": non_blocking})
            return self

    def empty_like(tensor: Any, **how: Any) -> Any:
        made.append(how)
        return Pinned()

    monkeypatch.setattr(torch, "empty_like", empty_like)
    on_device: Any = SimpleNamespace(device=torch.device("cuda:0"))
    parts.begin_move(on_device, parts.HOST)
    assert made == [{"device": parts.HOST, "pin_memory": True}, {"from": on_device, "non_blocking": True}]

    how: list[Any] = []

    def to(device: torch.device, non_blocking: bool) -> None:
        how.append((device, non_blocking))

    for pinned in (True, False):
        in_host: Any = SimpleNamespace(device=parts.HOST, is_pinned=lambda pinned=pinned: pinned, to=to)
        parts.begin_move(in_host, torch.device("cuda:1"))
    assert how == [(torch.device("cuda:1"), True), (torch.device("cuda:1"), False)]
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    parts.finish_moves(torch.device("cuda:1"))
    parts.finish_moves(parts.HOST)
    assert waited == [torch.device("cuda:1")]


def test_an_update_that_fails_leaves_the_state_where_the_step_wants_it(llama: Path, host: HostMemory) -> None:
    engine = engine_of(llama, True)
    engine.begin_updates()
    host.order()
    with pytest.raises(ValueError, match="weights_B"):
        engine.update(replace(BATCHES[0], weights_B=None))
    assert host.order() == []
    engine.end_updates()
    assert host.order() == ["host"]


def test_without_offload_nothing_moves(llama: Path, host: HostMemory) -> None:
    engine = engine_of(llama, False)
    engine.begin_updates()
    engine.update(BATCHES[0])
    engine.end_updates()
    assert host.moves == []


def test_weights_that_are_sampled_from_stay_and_the_optimizers_state_does_not(llama: Path, host: HostMemory) -> None:
    engine = engine_of(llama, True)
    engine.stay_on_device()
    host.order()
    engine.begin_updates()
    engine.update(BATCHES[0])
    engine.end_updates()
    assert len(host.moves) == 2 * len(engine._optimizer.parameters)
    assert all(parameter.isfinite().all() for parameter in engine.model.parameters())


@pytest.mark.slow
def test_an_offloaded_engine_resumes_like_one_on_the_device(llama: Path, tmp_path: Path) -> None:
    ends = []
    for offload in (False, True):
        engine = engine_of(llama, offload, dtype="bfloat16")
        engine.update(BATCHES[0])
        engine.save(tmp_path / str(offload))
        engine.update(BATCHES[1])
        engine.restore(tmp_path / str(offload))
        engine.update(BATCHES[2])
        ends.append([parameter.detach().clone() for parameter in engine.model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*ends, strict=True))
    files = [sorted((tmp_path / str(flag)).rglob("*.safetensors")) for flag in (False, True)]
    assert [value.read_bytes() for value in files[0]] == [value.read_bytes() for value in files[1]]


def test_a_restored_engine_rests(llama: Path, tmp_path: Path, host: HostMemory) -> None:
    trained = engine_of(llama, False)
    trained.update(BATCHES[0])
    trained.save(tmp_path)
    engine = engine_of(llama, True)
    host.order()
    engine.restore(tmp_path)
    assert host.order() == ["host"]


def test_a_restored_step_count_goes_to_the_device_with_the_moments(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fused AdamW needs it where the weights are, and restoring puts it where they rest."""
    trained = engine_of(llama, False)
    trained.update(BATCHES[0])
    trained.save(tmp_path)
    engine = engine_of(llama, True)
    engine.restore(tmp_path)
    monkeypatch.setattr(parts, "begin_move", lambda tensor, device: tensor)
    engine._optimizer.to(torch.device("meta"))
    states = engine._optimizer._adamw.state.values()
    assert states
    assert {state["step"].device.type for state in states} == {"meta"}


def test_merged_weights_are_made_one_by_one(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the device there is one merged weight at a time: the one before is in host memory by then."""
    engine = engine_of(llama, False, lora=LoraConfig(enabled=True, rank=2))
    engine.update(BATCHES[0])
    made: list[Any] = []

    def moved(tensor: Tensor, device: torch.device) -> Tensor:
        assert device.type == "cpu"
        assert not [worker for worker in made if worker() is not None], "an earlier merged weight is still there"
        made.append(ref(tensor))
        return tensor.clone()

    monkeypatch.setattr(parts, "moved", moved)
    tensors = whole_tensors(engine.model)
    assert len(made) == 2 * 7, "every linear layer of both layers"
    assert len(tensors) > len(made)
