"""The peaks of sharded ranks are measured again, at full size, with the engine of this tree and without data."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "results" / "sharding.md"
GIB = 2**30
COLUMNS = ("start", "update", "score", "hand-over", "held", "plan", "on the host")


@pytest.mark.real
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("model", "ranks"), [("7B", 64), ("14B", 8)])
def test_a_rank_holds_what_the_page_says_and_no_more_than_is_planned(model: str, ranks: int) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "sharding.py"), "--models", model, "--ranks", str(ranks)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=880, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    [row] = json.loads(done.stdout)["rows"]
    found = re.search(rf"^\| {model} \| {ranks} \| (.*)$", PAGE.read_text("utf-8"), re.M)
    assert found
    page = dict(zip(COLUMNS, map(float, found[1].split(" | ")[: len(COLUMNS)]), strict=True))
    assert {name: round(row[name] / GIB, 1) for name in COLUMNS} == page
    assert max(row[name] for name in ("start", "update", "score", "hand-over")) < row["plan"] < 78.4 * GIB
