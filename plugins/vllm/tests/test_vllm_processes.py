"""The number of processes of a vLLM engine, and the method of their start. Needs torch, and no vllm."""

import gc
import os
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest
from rlcore_vllm.processes import METHOD, computes_alone, forking

ON_CPU: dict[str, Any] = {"kv_cache_memory_bytes": 1}


@pytest.mark.parametrize(
    ("arguments", "binding", "alone"),
    [
        ({}, "auto", True),
        ({"tensor_parallel_size": 2}, "nobind", False),
        (ON_CPU, "nobind", True),
        (ON_CPU, "auto", False),
        (ON_CPU | {"tensor_parallel_size": 2}, "nobind", False),
    ],
)
def test_an_engine_with_one_device_has_no_workers_unless_vllm_binds_its_threads(
    arguments: dict[str, Any], binding: str, alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", binding)
    assert computes_alone(arguments) is alone


@pytest.mark.parametrize(
    ("arguments", "threads", "in_process", "in_actor", "method"),
    [
        (ON_CPU, 1, 1, False, "fork"),
        (ON_CPU, 2, 1, False, "spawn"),
        (ON_CPU, 1, 2, False, "spawn"),
        (ON_CPU, 1, 1, True, "spawn"),
        ({}, 1, 1, False, "spawn"),
    ],
)
def test_an_engine_on_a_cpu_is_forked_where_one_thread_computes(
    arguments: dict[str, Any],
    threads: int,
    in_process: int,
    in_actor: bool,
    method: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    imitate(in_process, in_actor, monkeypatch)
    monkeypatch.setenv(METHOD, "spawn")  # as vLLM sets it for CPUs
    before = gc.get_freeze_count()
    with forking(arguments, threads, None):
        assert os.environ[METHOD] == method
        assert (gc.get_freeze_count() > before) is (method == "fork"), "a fork collects nothing of its parent"
    assert gc.get_freeze_count() <= before
    assert (METHOD in os.environ) is (arguments != ON_CPU), "a later engine finds what the user has set"


def test_a_method_that_the_user_has_set_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    imitate(1, False, monkeypatch)
    monkeypatch.setenv(METHOD, "spawn")
    with forking(ON_CPU, 1, "spawn"):
        assert os.environ[METHOD] == "spawn"
    assert os.environ[METHOD] == "spawn"


def imitate(threads: int, in_actor: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have so many compute threads here, and be an actor of Ray or none."""
    import torch

    found: Any = ModuleType("vllm.ray.lazy_utils")
    found.is_in_ray_actor = lambda: in_actor
    for name in ("vllm", "vllm.ray", "vllm.ray.lazy_utils"):
        monkeypatch.setitem(sys.modules, name, found)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)


FORKING = """
import os, signal
from rlcore_vllm.orphans import end_with_parent

reading, writing = os.pipe()
os.set_blocking(writing, False)
signal.set_wakeup_fd(writing)
if not (fork := os.fork()):
    end_with_parent()
    signal.signal(signal.SIGUSR1, lambda number, frame: os._exit(7))
    os.kill(os.getpid(), signal.SIGUSR1)
    signal.pause()
print(os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]))
signal.set_wakeup_fd(-1)
os.close(writing)
print(os.read(reading, 1))
"""


def test_a_signal_to_a_fork_is_none_to_its_parent() -> None:
    """An event loop that handles signals has a descriptor to which they are written, also by its forks."""
    done = subprocess.run([sys.executable, "-c", FORKING], text=True, capture_output=True, timeout=60, check=True)
    assert done.stdout.split() == ["7", "b''"]
