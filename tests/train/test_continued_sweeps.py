"""Results of a sweep that is continued: only those of the same settings count, and only while they are there."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from rlcore.errors import ConfigError
from rlcore.train.sweeps import Sweep, cells_of, parse_values


def begun(sweep: Sweep) -> Sweep:
    """The sweep after its first run was killed in its first steps."""
    sweep._write()
    (sweep.directory / sweep.cells[0].name / "checkpoints" / "step_1").mkdir(parents=True)
    return sweep


def test_results_of_other_values_are_not_taken_for_those_of_a_run_of_the_same_name(tmp_path: Path) -> None:
    first, second = (cells_of((0,), (parse_values(f"{part}.max_tokens=4,8"),)) for part in ("rollout", "eval"))
    begun(Sweep(tmp_path, ["a.yaml"], first[:1]))
    with pytest.raises(ConfigError, match=r"max_tokens-4_seed-0' has results of rollout\.max_tokens=4 .*, not of eval"):
        Sweep(tmp_path, ["a.yaml"], second)
    Sweep(tmp_path, ["a.yaml"], second[1:])._write()
    assert len(Sweep(tmp_path, ["a.yaml"], first[:1]).cells) == 1, "it is still known"
    (tmp_path / "sweep.json").unlink()
    with pytest.raises(ConfigError, match=r"has results that its sweep\.json does not know"):
        Sweep(tmp_path, ["a.yaml"], first)


def test_results_of_a_file_before_it_was_changed_are_not_continued(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("actor: {lr: 0.1}")
    settings, cells = [str(file)], cells_of((0,), ())
    (tmp_path / "s").mkdir()
    Sweep(tmp_path / "s", settings, cells)._write()
    file.write_text("actor: {lr: 0.2}")
    begun(Sweep(tmp_path / "s", settings, cells))
    file.write_text("actor: {lr: 0.2}  # as in the paper")
    Sweep(tmp_path / "s", settings, cells)
    file.write_text("actor: {lr: 0.3}")
    with pytest.raises(ConfigError, match=r"has results of '.*a\.yaml' before it was changed; choose another name"):
        Sweep(tmp_path / "s", settings, cells)
    saved = json.loads((tmp_path / "s" / "sweep.json").read_text())
    (tmp_path / "s" / "sweep.json").write_text(json.dumps({key: saved[key] for key in ("arguments", "cells")}))
    Sweep(tmp_path / "s", settings, cells)


def test_a_metric_that_no_run_has_is_refused_with_the_nearest(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, ["a.yaml"], cells_of((0,), ()))
    assert sweep.metric("eval/held/mean") == "eval/held/mean", "no run has begun"
    (tmp_path / "seed-0").mkdir()
    (tmp_path / "seed-0" / "metrics.jsonl").write_text(
        '{"step": 1, "reward/mean": 0.5}\n{"step": 1, "eval/a/mean": 1}\n'
    )
    assert sweep.metric() == sweep.metric("eval/a/mean") == "eval/a/mean"
    with pytest.raises(ConfigError, match=r"--metric: no run has 'reward/meen'; did you mean 'reward/mean'"):
        sweep.metric("reward/meen")


def test_a_run_that_is_done_is_trained_again_if_its_results_are_gone(tmp_path: Path) -> None:
    cells = cells_of((0, 1), ())
    sweep = Sweep(tmp_path, ["a.yaml"], cells)
    for cell in cells:
        (tmp_path / cell.name / "checkpoints" / "step_1").mkdir(parents=True)
    sweep.cells = [replace(cell, state="done") for cell in sweep.cells]
    sweep._write()
    assert [cell.state for cell in Sweep(tmp_path, ["a.yaml"], cells).cells] == ["done", "done"]
    shutil.rmtree(tmp_path / "seed-0")
    assert [cell.state for cell in Sweep(tmp_path, ["a.yaml"], cells).cells] == ["waiting", "done"]
