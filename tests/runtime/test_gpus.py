"""GPUs as the driver tells of them, with a fake of its library: no torch, no device."""

import sys
from pathlib import Path
from typing import Any

import pytest

from rlcore.runtime import gpus, machine
from rlcore.runtime.gpus import Gpu, compile_problem, find_gpus, torch_problem

GIB = 2**30


class Nvml:
    """The driver's library of a machine whose devices have these GiB, of which `taken` are others'.

    `refuses` names a function that fails, `name` is that of each device, and `divided` devices are used as instances.
    """

    def __init__(
        self,
        *sizes: int,
        taken: int = 0,
        refuses: str = "",
        instances: tuple[str, ...] = (),
        name: str = "",
        divided: bool = False,
    ) -> None:
        self._sizes, self._taken, self._refuses, self._instances = sizes, taken, refuses, instances
        self._name, self._divided = name, divided
        self.is_open = False

    def nvmlInit_v2(self) -> int:
        self.is_open = self._refuses != "init"
        return int(not self.is_open)

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(self._sizes)
        return int(self._refuses == "count")

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, device: Any) -> int:
        device._obj.value = 1000 + index.value
        return int(self._refuses == "handle")

    def nvmlDeviceGetUUID(self, device: Any, uuid: Any, size: Any) -> int:
        uuid.value = f"GPU-{device.value}-ab".encode()
        return int(self._refuses == "uuid")

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, device: Any) -> int:
        device._obj.value = 999
        return int(uuid.decode() not in self._instances)

    def nvmlDeviceGetMemoryInfo(self, device: Any, memory: Any) -> int:
        gib = 10 if device.value == 999 else self._sizes[device.value - 1000]
        memory._obj.total, memory._obj.free = gib * GIB, (gib - self._taken) * GIB
        return int(self._refuses == "memory")

    def nvmlDeviceGetName(self, device: Any, text: Any, size: Any) -> int:
        text.value = self._name.encode()
        return int(self._refuses == "name")

    def nvmlDeviceGetMigMode(self, device: Any, current: Any, pending: Any) -> int:
        current._obj.value = int(self._divided)
        return int(self._refuses == "mode")

    def nvmlShutdown(self) -> int:
        self.is_open = False
        return 0


@pytest.fixture(autouse=True)
def _no_torch_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpus, "torch_problem", lambda: "")


def seen(monkeypatch: pytest.MonkeyPatch, visible: str, nvml: Any) -> list[int]:
    """GiB of the devices that a value of CUDA_VISIBLE_DEVICES leaves."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = find_gpus(nvml)
    assert bool(found.problem) is not bool(found.visible)
    return [(gpu.total or 0) // GIB for gpu in found.visible]


def test_without_a_variable_all_devices_are_seen_with_what_is_free() -> None:
    nvml = Nvml(80, 40, taken=3)
    assert find_gpus(nvml).visible == (
        Gpu("GPU-1000-ab", 80 * GIB, 77 * GIB),
        Gpu("GPU-1001-ab", 40 * GIB, 37 * GIB),
    )
    assert not nvml.is_open, "the library was left as it was found"


@pytest.mark.parametrize(
    ("visible", "sizes"),
    [
        ("1", [40]),
        (" 2 , 0 ", [24, 80]),
        ("", []),
        ("-1", []),
        ("none", []),
        ("7", []),
        ("0,-1,1", [80]),
        ("0,garbage,1", [80]),
        ("0,0", []),
        ("GPU-1001-ab", [40]),
        ("GPU-1002,GPU-1000", [24, 80]),
        ("GPU-100", []),
        ("GPU-7", []),
        ("0,GPU-1000", []),
        ("MIG-a", [10]),
        ("MIG-b", []),
        ("MIG-a,MIG-a", [10]),
        ("1,MIG-a", [40]),
    ],
)
def test_the_variable_is_read_as_cuda_reads_it(monkeypatch: pytest.MonkeyPatch, visible: str, sizes: list[int]) -> None:
    assert seen(monkeypatch, visible, Nvml(80, 40, 24, instances=("MIG-a",))) == sizes


def test_a_variable_that_names_no_device_is_the_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "all")
    assert find_gpus(Nvml(80, 40)).problem == "CUDA_VISIBLE_DEVICES='all' names none of the machine's 2 GPUs"
    assert find_gpus(Nvml(80)).problem == "CUDA_VISIBLE_DEVICES='all' names none of the machine's 1 GPU"


@pytest.mark.parametrize("refuses", ["init", "count", "handle", "uuid", "memory"])
def test_sizes_are_unknown_where_the_driver_does_not_tell_and_devices_are_counted_in_its_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, refuses: str
) -> None:
    nvml = Nvml(80, refuses=refuses)
    monkeypatch.setattr(gpus, "NVIDIA", tmp_path)
    assert find_gpus(nvml).problem == "this machine has no NVIDIA GPU"
    for name in ("0000:01", "0000:02"):
        (tmp_path / name).touch()
    assert [gpu.total for gpu in find_gpus(nvml).visible] == [None, None]
    for visible, many in {"1": 1, "GPU-x,GPU-y": 2, "MIG-x": 1, "2": 0}.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert len(find_gpus(nvml).visible) == many
    assert not nvml.is_open
    assert find_gpus(object()).visible == (), "another library, and a variable that names none"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n", "2.13.0+cpu"),
        ("__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", ""),
        ("__version__ = '2.13.0'\ncuda = None\nhip = '7.0'\n", ""),
    ],
)
def test_the_build_of_torch_is_read_without_importing_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, problem: str
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise AssertionError('torch was imported')")
    (tmp_path / "torch" / "version.py").write_text(text)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert torch_problem() == (f"torch {problem} is built without CUDA" if problem else "")
    (tmp_path / "torch" / "version.py").unlink()
    assert torch_problem() == "", "the import will tell"
    monkeypatch.setattr(sys, "path", [])
    assert torch_problem() == "torch is not installed"


def test_the_facts_of_a_machine_are_those_of_its_smallest_and_its_fullest_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = gpus.Gpus((Gpu("a", 80 * GIB, 20 * GIB), Gpu("b", 40 * GIB, 39 * GIB)), "why not")
    monkeypatch.setattr(machine, "find_gpus", lambda: found)
    facts = machine.machine_facts()
    assert (facts.gpus, facts.gpu_memory_bytes, facts.gpu_free_bytes) == (2, 40 * GIB, 20 * GIB)
    assert facts.gpu_problem == "why not"
    assert facts.usable_gpu_bytes == 20 * GIB


def test_the_name_of_a_whole_device_is_read_where_the_driver_reports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "NVIDIA H100 80GB HBM3"

    def names(**options: Any) -> list[str]:
        nvml = Nvml(80, 80, name=name, instances=("MIG-a",), **options)
        found = [gpu.name for gpu in find_gpus(nvml).visible]
        assert not nvml.is_open
        return found

    assert names() == [name, name]
    assert names(refuses="mode") == [name, name], "a card that cannot be divided has no mode"
    assert names(refuses="name") == ["", ""], "the sizes are known nevertheless"
    assert names(divided=True) == ["", ""], "CUDA uses an instance, even if the variable names none"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a")
    assert names() == [""], "an instance has a part of the card"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert names() == [name]
    for missing, found in (("nvmlDeviceGetName", [""]), ("nvmlDeviceGetMigMode", [name])):
        with monkeypatch.context() as older:
            older.delattr(Nvml, missing)
            assert names() == found, "a library of an older driver"


def test_the_facts_of_a_machine_have_the_card_that_all_devices_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def card(*devices: Gpu) -> str:
        monkeypatch.setattr(machine, "find_gpus", lambda: gpus.Gpus(devices))
        return machine.machine_facts().card

    h100, h200 = Gpu("a", 80 * GIB, name="NVIDIA H100 80GB HBM3"), Gpu("b", 140 * GIB, name="NVIDIA H200")
    assert card(h100, h100) == "H100-80GB"
    assert card(h100, h200) == card(h100, Gpu("c", 80 * GIB)) == card(h100, Gpu("c", name=h100.name)) == card() == ""


def test_kernels_need_triton_and_a_c_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"triton": False}
    monkeypatch.setattr(gpus.importlib.util, "find_spec", lambda name: object() if installed[name] else None)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert compile_problem() == "triton is not installed"
    installed["triton"] = True
    assert (
        compile_problem()
        == "triton needs a C compiler, and this machine has neither gcc nor clang, nor the variable CC"
    )
    for variable, name in ((None, "gcc"), (None, "clang"), ("CC", "mycc")):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
        if variable:
            monkeypatch.setenv(variable, name)
        assert compile_problem() == "", name
        (tmp_path / name).unlink()
