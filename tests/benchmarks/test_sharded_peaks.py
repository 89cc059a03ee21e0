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


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("model", "ranks"), [("7B", 64), ("14B", 8), ("32B", 64)])
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


def test_every_model_of_the_page_holds_less_than_its_plan_and_than_a_card() -> None:
    rows = re.findall(r"^\| (\d+B) \| (\d+) \| (.*)$", PAGE.read_text("utf-8"), re.M)
    assert [(model, int(ranks)) for model, ranks, _ in rows] == [
        (model, ranks) for model in ("7B", "14B", "32B") for ranks in (8, 64)
    ]
    refused = []
    for model, ranks, rest in rows:
        sizes = dict(zip(COLUMNS, map(float, rest.split(" | ")[: len(COLUMNS)]), strict=True))
        assert max(sizes[name] for name in ("start", "update", "score", "hand-over")) < min(sizes["plan"], 78.4)
        refused += [(model, ranks)] if sizes["plan"] > 78.4 else []
    assert refused == [("32B", "8")]
