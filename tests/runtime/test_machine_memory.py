"""Freed memory is kept for what comes next, and given back when it is asked for."""

import subprocess
import sys

import pytest

SCRIPT = """
import numpy as np
from rlcore.engines.freed_memory import give_back_freed_memory, keep_freed_memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

keep_freed_memory()
start = resident()
arrays = [np.ones(2**20) for _ in range(25)]
full = resident()
arrays.clear()
kept = resident()
give_back_freed_memory("cpu")
print(full - start, kept - start, resident() - start)
"""


@pytest.mark.slow
def test_memory_is_kept_until_it_is_given_back() -> None:
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=60)
    full, kept, given_back = (int(word) / 2**20 for word in run.stdout.split())
    assert full > 190
    assert kept > 190, "glibc would have given arrays of 8 MiB back at once"
    assert given_back < 50
