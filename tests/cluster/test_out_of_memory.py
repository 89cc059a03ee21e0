"""Memory that is exhausted during a run: one line with the estimate, the peak and the settings that lower it."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlcore.cluster.host import named
from rlcore.cluster.out_of_memory import in_words
from rlcore.config import RunConfig
from rlcore.contracts.workers import MemoryPlan, WorkerContext
from rlcore.engines.hf.sample.decode import Decoder
from rlcore.engines.hf.train.engine import TrainEngine
from rlcore.errors import RlcoreError, WorkerError
from rlcore.testing import write_prompts
from rlcore.testing.tiny import write_tiny_model
from rlcore.train import train

GIB = 2**30
TEXT = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.19 GiB"


def context(device: str = "cuda:0", memory: MemoryPlan | None = None) -> WorkerContext:
    values: Any = {"role": "actor", "replica": 0, "rank": 0, "num_ranks": 1, "config": RunConfig(), "section": None}
    values |= {"targets": {}, "run_dir": Path(), "seed": 0, "threads": 1, "device": device, "memory": memory}
    return WorkerContext(**values)


PLANNED = MemoryPlan(30 * GIB, "lower actor.micro_batch_tokens or rollout.max_tokens")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """GiB of a device that is not there: all of it, what is free, what this process has reserved, and its peak."""
    sizes = {"total": 80.0, "free": 1.0, "reserved": 70.0, "peak": 68.5, "allocated": 68.0}
    cuda = SimpleNamespace(
        mem_get_info=lambda name: (int(sizes["free"] * GIB), int(sizes["total"] * GIB)),
        memory_reserved=lambda name: int(sizes["reserved"] * GIB),
        memory_allocated=lambda name: int(sizes["allocated"] * GIB),
        max_memory_allocated=lambda name: int(sizes["peak"] * GIB),
    )
    monkeypatch.setattr(torch, "cuda", cuda)
    return sizes


@pytest.mark.usefixtures("device")
def test_a_call_that_exhausts_the_device_names_estimate_peak_others_and_knob() -> None:
    with pytest.raises(WorkerError) as caught, named("actor[0.0].update()", context(memory=PLANNED)):
        raise torch.OutOfMemoryError(TEXT)
    assert str(caught.value) == (
        "actor[0.0].update(): memory of cuda:0 is exhausted: the plan estimated 30.0 GiB, the peak was 68.5 of the "
        "device's 80.0 GiB, 9.0 GiB are used by other processes and contexts, 2.50 GiB more were asked for; "
        "lower actor.micro_batch_tokens or rollout.max_tokens"
    )


def test_memory_of_others_is_named_only_where_there_is_some(device: dict[str, float]) -> None:
    device["free"] = 9.5
    assert "other processes" not in in_words(torch.OutOfMemoryError(TEXT), context(memory=PLANNED))
    device["free"] = 1.0
    assert "9.0 GiB are used by other" in in_words(torch.OutOfMemoryError(TEXT), context(memory=PLANNED))


def test_memory_in_pieces_is_named_with_the_setting_that_joins_them(
    device: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    error = torch.OutOfMemoryError(TEXT)
    assert "pieces" not in in_words(error, context(memory=PLANNED)), "what little every allocator keeps"
    device["allocated"] = 60.0
    line = in_words(error, context(memory=PLANNED))
    assert "10.0 GiB are reserved in pieces without tensors, 2.50 GiB more were asked for; set " in line
    assert line.endswith(
        "; set PYTORCH_ALLOC_CONF=expandable_segments:True in the environment, or lower actor.micro_batch_tokens or "
        "rollout.max_tokens"
    )
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:True")
    assert "pieces" not in in_words(error, context(memory=PLANNED)), "they grow already"


HOSTS = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("method", ["snapshot", "write_snapshot", "save"])
@pytest.mark.parametrize("error", [MemoryError(), HOSTS], ids=["python", "torch"])
@pytest.mark.parametrize(("device_name", "place"), [("cuda:0", "the host"), ("cpu", "cpu")])
def test_a_checkpoint_without_host_memory_for_its_copy_is_not_advised_to_train_on_fewer_tokens(
    method: str, error: Exception, device_name: str, place: str
) -> None:
    with pytest.raises(WorkerError) as caught, named(f"actor[0].{method}()", context(device_name, PLANNED)):
        raise error
    line = str(caught.value)
    assert line.startswith(f"actor[0].{method}(): memory of {place} is exhausted: the peak was ")
    assert "a checkpoint takes a copy of weights and optimizer state: end other processes of this machine" in line
    assert "tokens" not in line
    assert "30.0 GiB" not in line, "the plan's estimate is that of updates"


@pytest.mark.usefixtures("device")
def test_a_checkpoint_that_exhausts_the_device_is_not_advised_to_train_on_fewer_tokens() -> None:
    line = in_words(torch.OutOfMemoryError(TEXT), context(memory=PLANNED), "actor[0.0].snapshot()")
    assert "memory of cuda:0 is exhausted: the peak was 68.5 of the device's 80.0 GiB" in line
    assert line.endswith(
        "a checkpoint gathers weights there, one layer at a time: leave more of the device to this role"
    )


@pytest.mark.usefixtures("device")
def test_host_memory_is_not_called_that_of_a_device() -> None:
    line = in_words(HOSTS, context(memory=PLANNED), "actor[0].weights()")
    assert line.startswith("memory of the host is exhausted: the peak was ")
    assert line.endswith("; end other processes of this machine, or set offload=false or rollout.weight_sync=disk")


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (torch.OutOfMemoryError(TEXT), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_is_not_an_allocators_stays_what_it_is(error: Exception, is_memory: bool) -> None:
    def raise_through_another() -> None:
        try:
            raise error
        except Exception as cause:
            raise WorkerError("the sampler stopped") from cause

    with pytest.raises(WorkerError) as caught, named("rollout[0].generate()", context("cpu")):
        raise_through_another()
    assert ("memory of cpu is exhausted: the plan does not know its memory" in str(caught.value)) is is_memory
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "overrides", "knobs"),
    [
        ("update", {}, "lower actor.micro_batch_tokens, data.max_prompt_tokens or rollout.max_tokens"),
        ("score", {"algo": {"kl": {"placement": "loss"}}}, "lower "),
        ("sample", {}, "lower rollout.max_rows, rollout.max_tokens or data.max_prompt_tokens"),
    ],
)
def test_a_length_that_fits_the_plan_and_not_the_device_ends_the_run_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, overrides: dict[str, Any], knobs: str
) -> None:
    (tmp_path / "rewards.py").write_text("async def length(trajectory):\n    return float(len(trajectory.text()))\n")

    def exhausted(*arguments: object) -> None:
        raise torch.OutOfMemoryError(TEXT)

    owner, name = {
        "update": (TrainEngine, "_gradients"),
        "score": (TrainEngine, "_score"),
        "sample": (Decoder, "_pass"),
    }[call]
    monkeypatch.setattr(owner, name, exhausted)
    config = {
        "model": {"path": str(write_tiny_model(tmp_path / "tiny")), "tokenizer": "bytes"},
        "data": {"sources": {"all": {"path": str(write_prompts(tmp_path / "prompts.jsonl", 4, "{index}"))}}},
        "rollout": {"samples_per_prompt": 2, "max_tokens": 4},
        "reward": {"functions": {"length": {"fn": f"{tmp_path / 'rewards.py'}:length"}}},
        "train": {"prompts_per_step": 2, "max_steps": 1, "dir": str(tmp_path / "runs"), "name": "run"},
        "cluster": {"device": "cpu"},
    }
    with pytest.raises(RlcoreError) as caught:
        train(config | overrides)
    line = str(caught.value)
    assert "\n" not in line
    assert "memory of cpu is exhausted: the plan estimated 0.5 GiB, the peak was " in line
    assert f"2.50 GiB more were asked for; {knobs}" in line
    assert sys.modules["torch"] is torch
