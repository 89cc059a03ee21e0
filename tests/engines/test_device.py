"""A worker's use of its GPU before it loads a model, with a torch that finds what the test configures."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlcore.config import ClusterConfig, EngineConfig, RunConfig
from rlcore.contracts.workers import WorkerContext
from rlcore.engines.hf import worker
from rlcore.engines.hf.device import check_gpu, prepare_device
from rlcore.errors import ConfigError

PTX = ["sm_75", "sm_80", "sm_90", "compute_90"]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Sets what torch finds: CUDA of its build, a capability, and the architectures of the build."""

    def finds(cuda: str | None, capability: tuple[int, int], built: list[str], *, available: bool = True) -> None:
        monkeypatch.setattr(torch, "version", SimpleNamespace(cuda=cuda, hip=None))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA B200")
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: built)

    before = torch.get_float32_matmul_precision()
    yield finds
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("capability", "built"),
    [
        ((9, 0), PTX),
        ((8, 6), PTX),
        ((8, 9), ["sm_80"]),
        ((10, 0), PTX),
        ((9, 0), ["sm_90a"]),
        ((12, 0), ["sm_100", "sm_120"]),
        ((9, 0), []),
    ],
)
def test_a_build_with_code_for_the_gpu_passes(gpu: Any, capability: tuple[int, int], built: list[str]) -> None:
    gpu("13.0", capability, built)
    check_gpu("cuda:0")


@pytest.mark.parametrize(
    ("cuda", "capability", "built", "available", "message"),
    [
        (None, (9, 0), PTX, True, "is built without CUDA"),
        ("13.0", (9, 0), PTX, False, "(CUDA 13.0) finds no GPU that it can use; needs a driver for that CUDA"),
        ("12.1", (10, 0), PTX[:-1], True, "NVIDIA B200 is sm_100, and torch"),
        ("12.1", (10, 0), PTX[:-1], True, "has code for sm_75, sm_80, sm_90 only"),
        ("12.1", (8, 0), ["sm_86", "sm_90"], True, "is sm_80"),
        ("12.1", (7, 5), ["sm_80", "compute_80"], True, "is sm_75"),
    ],
)
def test_a_build_that_cannot_compute_on_it_is_one_line_with_both_names(
    gpu: Any, cuda: str | None, capability: tuple[int, int], built: list[str], available: bool, message: str
) -> None:
    gpu(cuda, capability, built, available=available)
    with pytest.raises(ConfigError) as caught:
        check_gpu("cuda:0")
    line = str(caught.value)
    assert message in line
    assert f"torch {torch.__version__}" in line
    assert line.startswith("cluster.device=cuda: ")
    assert line.endswith("or choose cluster.device=cpu")
    assert "\n" not in line


def context(device: str, *, in_process: bool = False, **actor: Any) -> WorkerContext:
    config = RunConfig(cluster=ClusterConfig(device="cuda", in_process=in_process), actor=EngineConfig(**actor))
    return WorkerContext("actor", 0, 0, 1, config, None, {}, Path(), seed=1, threads=0, device=device)


@pytest.mark.parametrize(
    ("settings", "precision"),
    [
        ({"dtype": "float32", "tf32": True}, "high"),
        ({"dtype": "float32"}, "highest"),
        ({"dtype": "bfloat16", "tf32": True}, "highest"),
        ({"dtype": "float32", "tf32": True, "in_process": True}, "highest"),
    ],
)
def test_float32_products_use_tensor_cores_in_the_process_of_a_worker_alone(
    gpu: Any, settings: dict[str, Any], precision: str
) -> None:
    gpu("13.0", (9, 0), PTX)
    torch.set_float32_matmul_precision("highest")
    prepare_device(context("cuda:0", **settings))
    assert torch.get_float32_matmul_precision() == precision


def test_workers_look_at_their_gpu_first_and_at_none_on_a_cpu(gpu: Any) -> None:
    gpu(None, (9, 0), PTX)
    with pytest.raises(ConfigError, match="is built without CUDA"):
        worker.prepare_process(context("cuda:0"))
    state = torch.get_rng_state()
    worker.prepare_process(context("cpu"))
    torch.set_rng_state(state)
