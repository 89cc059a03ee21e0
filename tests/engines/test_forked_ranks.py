"""Ranks that are forked are processes of one script each, and no failure of one is lost."""

from pathlib import Path

import pytest
from forked_ranks import outputs_of_ranks

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("forked_ranks")]

SCRIPT = """
import os, sys
import numpy as np, torch

if sys.argv[1] == "raises":
    raise ValueError("only here")
if sys.argv[1] == "is killed":
    os.kill(os.getpid(), 9)
modules = [__name__, len(os.listdir("/proc/self/task"))]
print(*sys.argv[1:], os.environ["GLOO_SOCKET_IFNAME"], *modules, hash("a"), np.random.rand(), sep="; ")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_ranks_run_the_script_as_new_processes_would(script: Path) -> None:
    outputs = outputs_of_ranks(script, [("a", "0"), ("b", "1")], {"GLOO_SOCKET_IFNAME": "lo"})
    first, second = (output.strip().split("; ") for output in outputs)
    assert first[:5] == ["a", "0", "lo", "__main__", "1"]
    assert second[:5] == ["b", "1", "lo", "__main__", "1"]
    assert first[5] != second[5], "sets of strings have another order"
    assert first[6] != second[6], "numpy draws other numbers"


@pytest.mark.parametrize(("end", "code"), [("raises", 1), ("is killed", -9)])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_rank_that_fails_fails_the_test(script: Path, end: str, code: int, place: int) -> None:
    ranks = [("fine",), ("fine",), ("fine",)]
    ranks[place] = (end,)
    with pytest.raises(AssertionError) as failed:
        outputs_of_ranks(script, ranks, {"GLOO_SOCKET_IFNAME": "lo"})
    codes = [0, 0, 0]
    codes[place] = code
    assert str(codes) in str(failed.value)
    assert ("only here" in str(failed.value)) == (end == "raises")
