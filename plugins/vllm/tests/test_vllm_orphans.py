"""A worker of vLLM ends with the process that started it, also while it waits in a call that never returns."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from rlcore.testing.leaks import is_running

PROGRAM = """
import multiprocessing, sys, threading, time, types

def worker(ready):
    names = ["vllm", "vllm.distributed", "vllm.distributed.weight_transfer", "vllm.distributed.weight_transfer.factory"]
    sys.modules |= {name: types.ModuleType(name) for name in names}
    factory = sys.modules[names[-1]]
    factory.WeightTransferEngineFactory = types.SimpleNamespace(register_engine=lambda *engine: None)
    import rlcore_vllm.extension
    ready.set()
    threading.Lock().acquire() and time.sleep(600)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    child = context.Process(target=worker, args=(ready,))
    child.start()
    ready.wait()
    print(child.pid, flush=True)
    time.sleep(600)
"""


def test_a_worker_that_waits_ends_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(tmp_path / "program.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        assert is_running(worker)
        os.kill(parent.pid, signal.SIGKILL)
    ends_at = time.monotonic() + 10.0
    while is_running(worker) and time.monotonic() < ends_at:
        time.sleep(0.02)
    assert not is_running(worker)
