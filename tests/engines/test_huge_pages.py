"""Large tensors on a CPU are in huge pages."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlcore.config import RunConfig
from rlcore.contracts.workers import WorkerContext
from rlcore.engines.hf.worker import prepare_process
from rlcore.engines.huge_pages import VARIABLE, use_huge_pages

RUN = """
import sys
from pathlib import Path

from rlcore.testing.runs import run_settings
from rlcore.train import train

train(run_settings(Path(sys.argv[1]), 1), plugins="null")

import torch

tensor = torch.ones(2**22)
flags, inside = "", False
for line in Path("/proc/self/smaps").read_text().splitlines():
    begin, dash, end = line.split()[0].partition("-")
    if dash:
        inside = int(begin, 16) <= tensor.data_ptr() + 2**21 < int(end, 16)
    elif inside and line.startswith("VmFlags:"):
        flags = line
print(flags)
"""


@pytest.mark.parametrize(("before", "after"), [(None, "1"), ("0", "0")])
def test_huge_pages_are_used_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, before: str | None, after: str
) -> None:
    monkeypatch.setenv(VARIABLE, "2")  # restores what the session has
    if before is None:
        del os.environ[VARIABLE]
    else:
        os.environ[VARIABLE] = before
    use_huge_pages()
    assert os.environ[VARIABLE] == after


@pytest.mark.parametrize(("device", "set_to"), [("cpu", "1"), ("cuda:0", None)])
def test_a_worker_on_a_cpu_uses_huge_pages(monkeypatch: pytest.MonkeyPatch, device: str, set_to: str | None) -> None:
    monkeypatch.setenv(VARIABLE, "2")
    del os.environ[VARIABLE]
    monkeypatch.setattr("rlcore.engines.hf.worker.pin_exactly", lambda: None)  # it would change the environment, too
    monkeypatch.setattr("rlcore.engines.hf.device.prepare_device", lambda context: None)
    context = WorkerContext("actor", 0, 0, 1, RunConfig(), None, {}, Path(), seed=1, threads=0, device=device)
    with torch.random.fork_rng():
        prepare_process(context)
    assert os.environ.get(VARIABLE) == set_to


@pytest.mark.slow
@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this kernel has no huge pages")
def test_a_run_asks_for_huge_pages_before_its_first_tensor(tmp_path: Path) -> None:
    """The algorithms are tried on tensors before a worker starts."""
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    command = [sys.executable, "-c", RUN, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert "hg" in done.stdout.splitlines()[-1].split(), "the kernel was not asked for huge pages"
