"""Weights that leave a sharded actor: host memory holds a unit of them at a time, or the one copy that is sent."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from live_bytes import LiveBytes
from safetensors.torch import load_file
from torch import Tensor

from rlcore.config import LoraConfig, ModelConfig, RolloutConfig
from rlcore.contracts.weights import weights_of
from rlcore.engines.hf.listeners import Listeners
from rlcore.engines.hf.train.backbone import Model
from rlcore.engines.hf.train.gather import taken, weights_by_unit
from rlcore.engines.hf.train.model import ModelKind, load_model
from rlcore.engines.hf.train.ranks import Ranks
from rlcore.engines.hf.train.shards import Shards, names_by_unit, units_of
from rlcore.engines.hf.train.state import whole_tensors
from rlcore.engines.hf.train.unit_files import save_whole_in_units
from rlcore.engines.hf.worker import HfActor
from rlcore.errors import WorkerError
from rlcore.testing.tiny import write_tiny_model

LAYERS = 8


class Gathered(Shards):
    """Shards of one rank, which are whole already."""

    def __init__(self, model: Any) -> None:
        self._names = names_by_unit(model, units_of(model))
        self._is_whole = True


class Alone(Ranks):
    """One rank, without a process group."""

    def __init__(self) -> None:
        self.rank, self.num = 0, 1

    def gather(self, value: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [dict(value)]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A model whose layers are most of it, and much alike in size."""
    return write_tiny_model(tmp_path / "tiny", hidden_size=64, intermediate_size=128, num_hidden_layers=LAYERS)


def loaded(directory: Path, lora: bool) -> Model:
    """The model, with an adapter that adds something if it has one."""
    config = LoraConfig(enabled=lora, rank=2)
    found = load_model(
        ModelKind.CAUSAL_LM, ModelConfig(path=str(directory)), dtype="float32", device="cpu", lora=config
    )
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
    return found


def unit_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of the largest unit."""
    sizes: dict[str, int] = {}
    for name, tensor in tensors.items():
        unit = ".".join(name.split(".")[:3]) if ".layers." in name else "rest"
        sizes[unit] = sizes.get(unit, 0) + tensor.nbytes
    return max(sizes.values())


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_files_are_written_with_a_unit_in_host_memory_at_a_time(directory: Path, tmp_path: Path, lora: bool) -> None:
    model = loaded(directory, lora)
    expected = {name: tensor.clone() for name, tensor in whole_tensors(model).items()}
    whole, unit = sum(tensor.nbytes for tensor in expected.values()), unit_bytes(expected)
    assert whole > 5 * unit
    with LiveBytes([*model.parameters(), *model.buffers()]) as live:
        save_whole_in_units(model, Gathered(model), Alone(), tmp_path / "out")
    # Weights that are in host memory are written from there; an adapter is merged into a copy of a unit.
    assert unit <= live.peak < 3.2 * unit if lora else live.peak == 0
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) == LAYERS + 1
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert found.keys() == expected.keys()
    assert [name for name, tensor in found.items() if not torch.equal(tensor, expected[name])] == []


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_units_come_one_at_a_time_and_hold_every_weight_once(directory: Path, lora: bool) -> None:
    model = loaded(directory, lora)
    expected = {name: tensor.clone() for name, tensor in whole_tensors(model).items()}
    found: list[tuple[str, float]] = []
    with LiveBytes([*model.parameters(), *model.buffers()]) as live:
        for name, tensor in weights_by_unit(model, Gathered(model), rank=0, takers=1):
            found.append((name, float(tensor.double().sum())))
    assert live.peak < 3.2 * unit_bytes(expected)
    assert len(found) == len(expected)
    assert dict(found) == {name: float(tensor.double().sum()) for name, tensor in expected.items()}
    assert list(weights_by_unit(model, Gathered(model), rank=1, takers=1)) == []


@pytest.mark.parametrize("takers", [2, 3, 4])
@pytest.mark.parametrize("sharded", [True, False], ids=["shards", "copies"])
def test_takers_share_out_weights_and_no_weight_comes_twice(directory: Path, takers: int, sharded: bool) -> None:
    model = loaded(directory, lora=False)
    expected = whole_tensors(model)
    shards = Gathered(model) if sharded else None
    parts = [dict(weights_by_unit(model, shards, rank=rank, takers=takers)) for rank in range(takers + 1)]
    assert parts.pop() == {}
    assert sum(map(len, parts)) == len(expected)
    together = {name: tensor for part in parts for name, tensor in part.items()}
    assert together.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in together.items())
    layers = [f"layers.{layer}." for layer in range(LAYERS)] if sharded else [""]
    for prefix in layers:
        sizes = [sum(tensor.nbytes for name, tensor in part.items() if prefix in name) for part in parts]
        largest = max(tensor.nbytes for name, tensor in expected.items() if prefix in name)
        assert max(sizes) <= sum(sizes) / takers + largest, "no rank has much more than its share"
        assert min(sizes) > 0


def test_equal_tensors_are_shared_out_equally_and_keep_their_order() -> None:
    tensors = {str(number): torch.ones(4) for number in range(8)} | {"large": torch.ones(16)}
    parts = [taken(tensors, rank, [0] * 3) for rank in range(3)]
    assert [list(part) for part in parts] == [["large"], ["0", "2", "4", "6"], ["1", "3", "5", "7"]]
    assert list(taken(tensors, 0, [0])) == list(tensors)
    assert list(taken({"next": torch.ones(1)}, 1, [8, 4])) == ["next"], "after what was dealt before"


EXPERTS = {
    "hidden_size": 64,
    "moe_intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": LAYERS,
}


@pytest.mark.parametrize("lora", [False, True], ids=["experts", "lora"])
def test_an_unsharded_model_yields_what_has_to_be_made_a_layer_at_a_time(tmp_path: Path, lora: bool) -> None:
    """Files have a tensor per expert, of which transformers makes one; an adapter is merged."""
    path = tmp_path / "made"
    if lora:
        write_tiny_model(path, hidden_size=64, intermediate_size=128, num_hidden_layers=LAYERS)
    else:
        write_tiny_model(path, "Qwen3Moe", **EXPERTS)
    model = loaded(path, lora)
    expected = {name: float(tensor.double().sum()) for name, tensor in whole_tensors(model).items()}
    unit, found = unit_bytes(whole_tensors(model)), {}
    with LiveBytes([*model.parameters(), *model.buffers()]) as live:
        for name, tensor in weights_by_unit(model, None, rank=0, takers=1):
            found[name] = float(tensor.double().sum())
    assert found == expected
    assert 0 < live.peak < 3.2 * unit


class Copies:
    """An engine that copies a model of one tensor."""

    def __init__(self) -> None:
        self.weight, self.ranks = torch.zeros(2**18), None  # the first step of shared memory

    def named_weights(self, takers: int | None) -> Iterator[tuple[str, Tensor]]:
        assert takers in (1, None)
        self.weight = self.weight.add_(1.0)
        yield "weight", self.weight


def actor_of(kind: str) -> HfActor:
    """An actor without an engine, which hands its weights over that way."""
    actor = HfActor.__new__(HfActor)
    config = SimpleNamespace(rollout=RolloutConfig(weights_bucket_mib=1))
    context = SimpleNamespace(weights_kind=kind, rank=0, address="127.0.0.1", device="cpu", config=config)
    actor.context = cast("Any", context)
    actor.before_change = Listeners()
    return actor


@pytest.mark.parametrize("kind", ["tcp", "shm"])
def test_the_process_that_sends_keeps_one_copy_and_no_second_one_while_it_is_made(kind: str) -> None:
    engine, actor = Copies(), actor_of(kind)
    actor.engine = cast("Any", engine)
    received: Sequence[float] = []
    try:
        with LiveBytes([engine.weight]) as live:
            for version in range(3):
                handle = actor.weights(version, Path("unused"))
                peak = live.peak
        received = [float(tensor[0]) for _, tensor in weights_of(handle)]
    finally:
        actor.close()
    assert received == [3.0]
    assert peak == 2**20


def test_weights_over_ipc_are_sent_while_they_are_loaded_and_only_until_they_change() -> None:
    actor = actor_of("ipc")
    actor.engine = cast("Any", Copies())
    try:
        handle = replace(actor.weights(4, Path("unused")), members=1)
        assert float(actor.engine.weight[0]) == 0.0, "nothing is gathered yet"  # type: ignore[attr-defined]
        with ThreadPoolExecutor(1) as threads:
            for times in (1.0, 2.0):
                task = threads.submit(lambda: dict(weights_of(handle)))
                actor.send_weights(handle)
                assert task.result(30)["weight"].tolist() == [times] * 2**18
        with pytest.raises(WorkerError, match="version 3 of the weights cannot be sent any more: they have changed"):
            actor.send_weights(replace(handle, version=3))
        actor._weights_change()
        with pytest.raises(WorkerError, match="version 4 of the weights cannot be sent any more"):
            actor.send_weights(handle)
    finally:
        actor.close()
