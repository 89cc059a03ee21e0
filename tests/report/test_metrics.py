"""metrics.jsonl and trajectories: valid JSON, whole after a crash, cut back on resume."""

import json
import math
from dataclasses import replace
from datetime import date
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.errors import CheckpointError, redaction
from rlcore.report.metrics import MetricsLog, TrajectoryLog, average, read, read_trajectories, trajectory_lines
from rlcore.types import (
    FinishReason,
    FrozenDict,
    Lane,
    Prompt,
    Reward,
    RewardStatus,
    ScoredTrajectory,
    Trajectory,
    TrajectoryId,
    frozen_messages,
)


def scored(sample: int, reward: Reward, completion: str = "4", prompt: str = "2+2?") -> ScoredTrajectory:
    question = Prompt("math/0", frozen_messages([{"role": "user", "content": prompt}]), "4", "math")
    return ScoredTrajectory(
        Trajectory(
            id=TrajectoryId("math/0", 1, sample),
            prompt=question,
            token_ids=np.arange(5, dtype=np.int32),
            loss_mask=np.array([False, False, True, True, True]),
            logprobs=np.zeros(5, dtype=np.float32),
            completion=completion,
            finish=FinishReason.LENGTH,
            versions=((2, 7),),
        ),
        reward,
    )


def without_time(records: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{name: value for name, value in record.items() if not name.startswith("time/")} for record in records]


def test_records_come_back_in_order_with_their_step(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    assert read(tmp_path) == []
    log.append(1, {"reward/mean": 0.25, "data/num_tokens": 7})
    log.append(1, {"eval/math/mean": np.float32(0.5)})
    log.append(2, {"reward/mean": 1e-300})
    records = read(tmp_path)
    assert without_time(records) == [
        {"step": 1, "reward/mean": 0.25, "data/num_tokens": 7.0},
        {"step": 1, "eval/math/mean": 0.5},
        {"step": 2, "reward/mean": 1e-300},
    ]
    assert all(record["time/unix_s"] > 1.7e9 for record in records)


def test_numbers_that_are_not_finite_are_null_on_disk_and_nan_when_read(tmp_path: Path) -> None:
    MetricsLog(tmp_path).append(3, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.0})
    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=pytest.fail)["a"] is None
    (record,) = read(tmp_path)
    assert [math.isnan(record[name]) for name in "abcd"] == [True, True, True, False]


def test_a_torn_last_line_is_ignored_by_readers_and_dropped_by_the_next_writer(tmp_path: Path) -> None:
    MetricsLog(tmp_path).append(1, {"a": 1.0})
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"step": 2, "a"')
    assert [record["step"] for record in read(tmp_path)] == [1]
    MetricsLog(tmp_path).append(2, {"a": 2.0})
    assert [(record["step"], record["a"]) for record in read(tmp_path)] == [(1, 1.0), (2, 2.0)]
    assert path.read_bytes().startswith(whole)


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(cut=st.integers(0, 200), keep=st.integers(-1, 4))
def test_a_crash_at_any_byte_leaves_a_log_that_can_be_continued(
    tmp_path_factory: pytest.TempPathFactory, cut: int, keep: int
) -> None:
    run_dir = tmp_path_factory.mktemp("run")
    log = MetricsLog(run_dir)
    for step in (1, 2, 3):
        log.append(step, {"a": step / 2})
    path = run_dir / "metrics.jsonl"
    left = path.read_bytes()[:cut]
    path.write_bytes(left)
    whole = left.count(b"\n")
    again = MetricsLog(run_dir)
    again.cut_back(keep)
    again.append(9, {"a": 9.0})
    assert [record["step"] for record in read(run_dir)] == [*range(1, min(whole, max(keep, 0)) + 1), 9]


def test_a_bad_line_in_the_middle_is_named(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.append(1, {"a": 1.0})
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + b"oops\n")
    log.append(2, {"a": 1.0})
    for use in (lambda: read(tmp_path), lambda: log.cut_back(1)):
        with pytest.raises(CheckpointError, match=r"metrics\.jsonl': b'oops\\n' is not a record of metrics"):
            use()


def test_cutting_back_drops_later_records_and_is_harmless_without_a_file(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.cut_back(5)
    assert not (tmp_path / "metrics.jsonl").exists()
    for step in (0, 1, 1, 2, 3):
        log.append(step, {"a": float(step)})
    log.cut_back(1)
    assert [record["step"] for record in read(tmp_path)] == [0, 1, 1]
    log.append(1, {"eval/heldout/mean": 0.5})
    log.cut_back(1, evaluated=False)
    assert [record.get("a") for record in read(tmp_path)] == [0.0, 1.0, 1.0]
    log.cut_back(-1)
    assert read(tmp_path) == []


def test_trajectories_hold_what_a_reader_asks_for(tmp_path: Path) -> None:
    good = Reward(0.5, FrozenDict({"accuracy": 1.0, "format": 0.0}), info=FrozenDict({"answer": 4}))
    failed = Reward(0.0, status=RewardStatus.FAILED, info=FrozenDict({"error": ValueError("x"), "n": math.nan}))
    log = TrajectoryLog(tmp_path)
    log.append(12, trajectory_lines([(scored(0, good, "vier 四 \ud800"), 0.75), (scored(1, failed), None)], Lane.TRAIN))
    assert [path.name for path in (tmp_path / "trajectories").iterdir()] == ["step_000012.jsonl"]
    first, second = read_trajectories(tmp_path, 12)
    assert first == {
        "id": {"prompt": "math/0", "epoch": 1, "sample": 0, "segment": 0},
        "lane": "train",
        "source": "math",
        "prompt": [{"role": "user", "content": "2+2?"}],
        "answer": "4",
        "completion": "vier 四 \ud800",
        "num_tokens": 5,
        "num_sampled": 3,
        "finish": "length",
        "versions": [[2, 7]],
        "turns": 1,
        "agent": {},
        "status": "ok",
        "score": 0.5,
        "components": {"accuracy": 1.0, "format": 0.0},
        "info": {"answer": 4},
        "advantage": 0.75,
    }
    assert (second["status"], second["advantage"], second["score"]) == ("failed", None, 0.0)
    opened = replace(scored(2, good), trajectory=replace(scored(2, good).trajectory, opening=({"role": "user"},)))
    assert json.loads(trajectory_lines([(opened, None)], Lane.TRAIN))["opening"] == [{"role": "user"}]
    assert second["info"] == {"error": "x", "n": None}


class Colour(Enum):
    RED = "red"


class Pair(NamedTuple):
    left: float
    right: Any


ODD = FrozenDict(
    {
        "nested": FrozenDict({"pair": Pair(math.inf, (1, [None, True]))}),
        "numpy": (np.float64(0.5), np.float32(0.25), np.arange(3)),
        "enums": [Colour.RED, Lane.EVAL],
        "texts": (date(2026, 1, 2), ValueError("vier 四"), {1}, MappingProxyType({"a": FrozenDict({"b": -math.inf})})),
        "numbers": [10**15, 1e-7, 1e22, -0.0],
    }
)


@pytest.mark.parametrize("more", [{}, {1: "a key that is a number"}, {"long": 2**70}, {"surrogate": "\ud800"}])
@pytest.mark.parametrize("secret", ["", "4f5e-4f5e", 'ü"\n\\4f5e'])
def test_whatever_rewards_say_a_line_says_the_same_however_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, secret: str, more: dict[Any, Any]
) -> None:
    monkeypatch.setattr(redaction, "_resolved", {})
    monkeypatch.setattr(redaction, "_in_json", {})
    monkeypatch.setenv("KEY", secret)
    redaction.remember_variable("KEY")
    log = TrajectoryLog(tmp_path)
    extra = FrozenDict({**ODD, "said": f"of {secret} and {json.dumps(secret)}", f"a key {secret}": 1, **more})
    log.append(1, trajectory_lines([(scored(0, Reward(1.0, info=extra)), 0.0)], Lane.TRAIN))
    [row] = read_trajectories(tmp_path, 1)
    assert row["info"] == {
        "nested": {"pair": [None, [1, [None, True]]]},
        "numpy": [0.5, 0.25, "[0 1 2]"],
        "enums": ["red", "eval"],
        "texts": ["2026-01-02", "vier 四", "{1}", {"a": {"b": None}}],
        "numbers": [10**15, 1e-7, 1e22, -0.0],
        "said": 'of ${oc.env:KEY} and "${oc.env:KEY}"' if secret else 'of  and ""',
        "a key ${oc.env:KEY}" if secret else "a key ": 1,
        **{str(key): value for key, value in more.items()},
    }


def test_a_step_may_hold_training_and_evaluation(tmp_path: Path) -> None:
    log = TrajectoryLog(tmp_path)
    log.append(2, trajectory_lines([(scored(0, Reward(1.0)), 0.0)], Lane.TRAIN))
    log.append(2, trajectory_lines([(scored(1, Reward(1.0)), None)], Lane.EVAL))
    assert [(row["lane"], row["id"]["sample"]) for row in read_trajectories(tmp_path, 2)] == [("train", 0), ("eval", 1)]
    assert read_trajectories(tmp_path, 3) == []


def test_cutting_back_removes_the_trajectories_of_later_steps(tmp_path: Path) -> None:
    log = TrajectoryLog(tmp_path)
    log.cut_back(0)
    for step in (1, 2, 10, 1_000_000, 2_000_000):
        log.append(step, trajectory_lines([(scored(0, Reward(1.0)), 0.0)], Lane.TRAIN))
    (tmp_path / "trajectories" / "notes.txt").write_text("mine")
    log.cut_back(2)
    names = sorted(path.name for path in (tmp_path / "trajectories").iterdir())
    assert names == ["notes.txt", "step_000001.jsonl", "step_000002.jsonl"]


def test_trajectories_that_cannot_be_removed_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "trajectories" / "step_000005.jsonl").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"step_000005\.jsonl': records cannot be written: .*with --resume"):
        TrajectoryLog(tmp_path).cut_back(3)


def test_an_average_is_over_those_that_have_the_metric() -> None:
    assert average([{"a": 1.0, "b": 4.0}, {"a": 2.0}]) == {"a": 1.5, "b": 4.0}
    assert average([]) == {}


def test_a_maximum_of_several_updates_is_the_largest_of_theirs() -> None:
    updates = [{"policy/ratio_max": 1.0}, {"policy/ratio_max": 7.0, "policy/importance_max": 3.0}, {}]
    assert average(updates) == {"policy/ratio_max": 7.0, "policy/importance_max": 3.0}
    assert math.isnan(average([{"policy/ratio_max": 1.0}, {"policy/ratio_max": math.nan}])["policy/ratio_max"])


def test_a_file_of_zeros_is_refused_after_one_record_s_bytes(tmp_path: Path) -> None:
    with (tmp_path / "metrics.jsonl").open("wb") as file:
        file.truncate(1 << 36)
    for use in (lambda: read(tmp_path), lambda: MetricsLog(tmp_path).cut_back(1)):
        with pytest.raises(CheckpointError, match=r"metrics\.jsonl': a line has 16 MiB or more"):
            use()
