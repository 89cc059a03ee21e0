"""Reward functions that misbehave, in whole runs: what training makes of them (cases 11 to 14, 17, 18 and 21)."""

import logging
from pathlib import Path
from typing import Any

import pytest

from rlcore.report import metrics
from rlcore.testing import write_prompts
from rlcore.train import TrainResult, train

pytestmark = [pytest.mark.fault, pytest.mark.timeout(240)]

FUNCTIONS = """
import re, time

def endless(trajectory):
    while trajectory.id.sample == 0 and trajectory.prompt.answer == "3":
        pass
    return 1.0

def regex(trajectory):
    if trajectory.id.sample == 0 and trajectory.prompt.answer == "3":
        re.match("(a+)+$", "a" * 64 + "b")
    return 1.0

def raises(trajectory):
    if trajectory.id.sample == 0 and trajectory.prompt.answer == "3":
        raise ValueError("no such luck")
    return 1.0

def none(data_source, solution_str, ground_truth, extra_info=None):
    return None if ground_truth == "3" else 1.0

def nan(data_source, solution_str, ground_truth, extra_info=None):
    return float("nan") if ground_truth == "3" else 1.0

def infinite(data_source, solution_str, ground_truth, extra_info=None):
    return float("inf") if ground_truth == "3" else 1.0

def text(data_source, solution_str, ground_truth, extra_info=None):
    return "1" if ground_truth == "3" else 1.0

def complex_number(data_source, solution_str, ground_truth, extra_info=None):
    return 1j if ground_truth == "3" else 1.0

def one_for_all(prompts, completions, **columns):
    return [1.0] if columns["answer"][0] == "3" else [1.0] * len(completions)

def generator(prompts, completions, **columns):
    return (1.0 for completion in completions) if columns["answer"][0] == "3" else [1.0] * len(completions)

def mutates(prompts, completions, tags, **columns):
    seen = len(tags[0])
    tags[0].append("changed")
    return [float(seen)]

async def blocks(trajectory):
    if trajectory.id.sample == 0 and trajectory.prompt.answer == "3":
        time.sleep(1.5)
    return 1.0
"""


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "rewards.py").write_text(FUNCTIONS)
    prompts = write_prompts(tmp_path / "prompts.jsonl", 8)
    lines = [line[:-1] + ', "tags": ["a"]}' for line in prompts.read_text().splitlines()]
    prompts.write_text("\n".join(lines) + "\n")
    return {
        "model": {"path": "", "tokenizer": "bytes"},
        "data": {"sources": {"train": {"path": str(prompts)}}},
        "rollout": {"backend": "null", "samples_per_prompt": 4, "max_tokens": 8},
        "reward": {"error_budget_frac": 0.2},
        "actor": {"backend": "null", "lr": 0.1},
        "train": {"prompts_per_step": 8, "max_steps": 1, "dir": str(tmp_path / "runs"), "name": "run"},
    }


def run(config: dict[str, Any], tmp_path: Path, name: str, **settings: Any) -> TrainResult:
    functions = {"bad": {"fn": f"{tmp_path / 'rewards.py'}:{name}", "deadline_s": 3.0, **settings}}
    config["reward"]["functions"] = functions | {"letters": {"fn": "count_letter"}}
    return train(config, plugins=["null"])


@pytest.mark.parametrize(
    ("name", "num_failed", "message"),
    [
        ("endless", 1, "no result within 3 s"),
        ("regex", 1, "no result within 3 s"),
        ("raises", 1, "no such luck"),
        ("nan", 4, "nan"),
        ("infinite", 4, "inf"),
        ("text", 4, "str"),
        ("complex_number", 4, "complex"),
        ("none", 4, "None"),
    ],
)
def test_a_failing_call_costs_its_own_sample_and_no_other(
    config: dict[str, Any], tmp_path: Path, name: str, num_failed: int, message: str
) -> None:
    """Scorecard cases 11, 12, 13 and 21."""
    result = run(config, tmp_path, name)
    rows = metrics.read_trajectories(result.run_dir, 1)
    failed = [row for row in rows if row["status"] == "failed"]
    assert len(rows) == 32
    assert len(failed) == num_failed
    assert all(row["answer"] == "3" and row["advantage"] is None for row in failed)
    assert all(message in str(row["info"]) for row in failed)
    assert all(row["components"]["bad"] == 1.0 and row["advantage"] is not None for row in rows if row not in failed)


@pytest.mark.parametrize("name", ["one_for_all", "generator"])
def test_a_list_of_the_wrong_length_or_kind_is_never_spread_over_a_group(
    config: dict[str, Any], tmp_path: Path, name: str
) -> None:
    """Scorecard case 14."""
    result = run(config, tmp_path, name, scope="group")
    rows = metrics.read_trajectories(result.run_dir, 1)
    failed = [row for row in rows if row["status"] == "failed"]
    assert len(failed) == 4
    assert all(row["answer"] == "3" for row in failed)


def test_changes_of_a_function_to_its_inputs_reach_no_other(config: dict[str, Any], tmp_path: Path) -> None:
    """Scorecard case 17."""
    result = run(config, tmp_path, "mutates", children=1)
    rows = metrics.read_trajectories(result.run_dir, 1)
    assert [row["components"]["bad"] for row in rows] == [1.0] * 32


def test_an_async_function_that_blocks_the_loop_is_named_and_the_others_finish(
    config: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Scorecard case 18."""
    with caplog.at_level(logging.WARNING, logger="rlcore"):
        result = run(config, tmp_path, "blocks")
    rows = metrics.read_trajectories(result.run_dir, 1)
    assert all(row["status"] == "ok" for row in rows)
    assert any("bad" in record.getMessage() for record in caplog.records)
