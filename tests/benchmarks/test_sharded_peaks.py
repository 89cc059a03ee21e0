"""The peaks of sharded ranks are measured again with the engine of this tree and without data, one at full size."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "results" / "sharding.md"
GIB = 2**30
COLUMNS = ("start", "update", "score", "hand-over", "held", "plan", "on the host")


def measured(*arguments: str) -> dict[str, int]:
    command = [sys.executable, str(ROOT / "benchmarks" / "sharding.py"), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=880, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    [row] = json.loads(done.stdout)["rows"]
    return dict(row)


def peak(row: Mapping[str, int]) -> int:
    return max(row[name] for name in ("start", "update", "score", "hand-over"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_rank_holds_what_the_page_says_and_no_more_than_is_planned() -> None:
    row = measured("--models", "7B", "--ranks", "64")
    found = re.search(r"^\| 7B \| 64 \| (.*)$", PAGE.read_text("utf-8"), re.M)
    assert found
    page = dict(zip(COLUMNS, map(float, found[1].split(" | ")[: len(COLUMNS)]), strict=True))
    assert {name: round(row[name] / GIB, 1) for name in COLUMNS} == page
    assert peak(row) < row["plan"] < 78.4 * GIB


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("model", "ranks"), [("14B", 8), ("32B", 64)])
def test_a_rank_of_a_larger_model_cut_to_few_layers_holds_no_more_than_is_planned(model: str, ranks: int) -> None:
    row = measured("--models", model, "--ranks", str(ranks), "--layers", "4")
    assert 0.8 * row["plan"] < peak(row) < row["plan"]


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
