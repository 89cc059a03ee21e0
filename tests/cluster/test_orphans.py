"""Processes that a child started are reaped: rlcore is the first process of a container."""

import subprocess
import sys
from pathlib import Path

import pytest

STARTS_ANOTHER = """
import subprocess

class Served:
    def start(self):
        return subprocess.Popen(["sleep", "60"]).pid
"""
FIRST_OF_A_CONTAINER = """
import asyncio, ctypes, os, sys
from pathlib import Path
from rlcore.cluster.child import ChildProcesses

async def main():
    children = ChildProcesses()
    child = await children.start(sys.argv[1] + ":Served", name="x")
    await child.call("start", deadline_s=10)
    await children.close()

ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: it gets the orphans below it, as the process 1 does
asyncio.run(main())
print(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())
"""


@pytest.mark.slow
def test_no_zombie_is_left_of_what_a_child_started(tmp_path: Path) -> None:
    (tmp_path / "served.py").write_text(STARTS_ANOTHER)
    command = [sys.executable, "-c", FIRST_OF_A_CONTAINER, str(tmp_path / "served.py")]
    done = subprocess.run(command, text=True, capture_output=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
