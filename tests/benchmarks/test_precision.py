"""The record of learning curves by number format, and the demo as TRL is given it."""

import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from rlcore.testing.rewards import make_prompt, make_trajectory

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, Any]]:
    """The benchmarks import each other by their bare names, as scripts of one folder do."""
    sys.path.insert(0, str(BENCHMARKS))
    before = set(sys.modules)
    try:
        yield {name: import_module(name) for name in ("precision", "precision_trl", "reward")}
    finally:
        sys.path.remove(str(BENCHMARKS))
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(BENCHMARKS)):
                del sys.modules[name]


def curve(*rewards: float, difference: float = 0.01) -> dict[str, Any]:
    """A run of as many steps as there are rewards."""
    return {
        "reward": list(rewards),
        "entropy": [2.0, 1.0],
        "difference": [difference] * len(rewards),
        "ratio": [1.0 + difference],
        "heldout": [0.5, 0.9],
        "commit": "abc",
    }


def test_a_record_is_read_again_and_runs_without_a_commit_are_of_the_records(
    modules: dict[str, Any], tmp_path: Path
) -> None:
    without = {name: value for name, value in curve(0.1, 0.3).items() if name != "commit"}
    record = {"curves": {"sums": {"float32": {"2": without, "0": curve(0.2)}}}, "machine": {"commit": "old"}}
    (tmp_path / "out.json").write_text(json.dumps(record))
    found = modules["precision"].kept_curves(tmp_path / "out")
    assert found == {"sums": {"float32": {2: {**without, "commit": "old"}, 0: curve(0.2)}}}
    assert modules["precision"].kept_curves(tmp_path / "none") == {}
    assert modules["precision"].kept_curves(None) == {}


def test_the_report_compares_seeds_that_both_have_and_says_which_ran(modules: dict[str, Any]) -> None:
    kinds = {
        "float32": {1: curve(0.2, 0.8), 0: curve(0.2, 0.6)},
        "bfloat16 nearest": {1: curve(0.2, 0.3, difference=0.02)},
        "TRL bfloat16": {1: {**curve(0.1, 0.4), "difference": [], "ratio": []}},
    }
    lines = modules["precision"].report({"sums": kinds}, "Made by this test.").splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]
    assert ["float32", "0, 1", "0.60, 0.80", "0.50 -> 0.90", "0.450", "", "2.00 -> 1.00"] in rows
    assert ["bfloat16 nearest", "1", "0.30", "0.50 -> 0.90", "0.250", "-0.250", "2.00 -> 1.00"] in rows
    assert ["float32", "0.20", "0.70"] in rows, "the mean curve"
    assert ["bfloat16 nearest", "2.0e-02", "2.0e-02", "2.0e-02", "2.0e-02", "1.020"] in rows
    assert [row[0] for row in rows].count("TRL bfloat16") == 2, "TRL logs no difference"
    assert "Not run: bfloat16 stochastic, float16, TRL float32." in lines
    page = (Path(__file__).parents[2] / "docs/results/precision.md").read_text("utf-8").splitlines()
    started = [line for line in lines if "stored in bfloat16" in line]
    assert len(started) == 1
    assert started[0] in page
    assert "Not run: float32, bfloat16 stochastic, bfloat16 nearest, float16." in lines, "of letters"


def test_the_peer_gets_the_demos_prompts_in_the_demos_order(modules: dict[str, Any]) -> None:
    """The first question of seed 1 is that of the run of `make demo` with that seed."""
    task = modules["precision_trl"]._task(seed=1, num_prompts=16)
    assert task["prompts"][0] == [
        {"role": "system", "content": "Answer with the number only."},
        {"role": "user", "content": "State the final answer to the following arithmetic problem: 2 + 3 ="},
    ]
    assert task["answers"][0] == "5"
    assert len(task["prompts"]) == len(task["answers"]) == 16
    assert len(task["heldout"]) == len(task["heldout_answers"]) == 25
    assert modules["precision_trl"]._task(seed=2, num_prompts=16)["prompts"] != task["prompts"]


@pytest.mark.parametrize("response", ["7", "The answer is 7.", "7.0", "", "seven", "7 is not 8", "-7", "77"])
def test_the_peers_reward_is_the_demos(modules: dict[str, Any], response: str) -> None:
    from rlcore_example_arithmetic import last_number

    expected = last_number(make_trajectory(make_prompt(answer="7"), text=response)).score
    messages = [{"role": "assistant", "content": response}]
    assert modules["reward"].last_number(prompts=[""], completions=[messages], answer=["7"]) == [expected]
