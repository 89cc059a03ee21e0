"""Parts of the machine for runs side by side."""

import os

import pytest

from rlcore.runtime.gpus import VISIBLE, Gpu, Gpus
from rlcore.runtime.machine_share import MachineShare, shares_of_machine


def _machine(monkeypatch: pytest.MonkeyPatch, cores: int, gpus: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    found = Gpus(tuple(Gpu(f"GPU-{index}") for index in range(gpus)))
    monkeypatch.setattr("rlcore.runtime.machine_share.find_gpus", lambda: found)


def test_cores_and_gpus_are_divided_and_each_is_given_once(monkeypatch: pytest.MonkeyPatch) -> None:
    _machine(monkeypatch, 8, 5)
    shares = shares_of_machine(3)
    assert [share.cores for share in shares] == [(0, 1, 2), (3, 4, 5), (6, 7)]
    assert [share.gpus for share in shares] == [("GPU-0", "GPU-1"), ("GPU-2", "GPU-3"), ("GPU-4",)]


def test_one_part_is_the_machine_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    _machine(monkeypatch, 8, 2)
    assert shares_of_machine(1) == (MachineShare(),)


def test_more_parts_than_cores_share_them_and_a_machine_without_gpus_hides_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _machine(monkeypatch, 2, 0)
    shares = shares_of_machine(3)
    assert [share.cores for share in shares] == [(0,), (1,), (0,)]
    assert {share.gpus for share in shares} == {None}


def test_more_parts_than_gpus_leave_the_last_without(monkeypatch: pytest.MonkeyPatch) -> None:
    _machine(monkeypatch, 4, 1)
    assert [share.gpus for share in shares_of_machine(2)] == [("GPU-0",), ()]


@pytest.mark.parametrize("before", [None, "3,4"])
def test_a_share_is_seen_inside_only(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if before is None:
        monkeypatch.delenv(VISIBLE, raising=False)
    else:
        monkeypatch.setenv(VISIBLE, before)
    cores = os.sched_getaffinity(0)
    with MachineShare((min(cores),), ("GPU-7",)).confined():
        assert (os.sched_getaffinity(0), os.environ[VISIBLE]) == ({min(cores)}, "GPU-7")
    assert (os.sched_getaffinity(0), os.environ.get(VISIBLE)) == (cores, before)
