"""A run directory that is deleted during the run, wholly or partly: the run ends in one line with the remedy."""

import itertools
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rlcore.errors import CheckpointError
from rlcore.testing.runs import run_settings
from rlcore.train import train


def replaced(name: str) -> Callable[[Path], object]:
    """Another thing stands where the run writes: a file for a directory, a directory for a file.

    The thread of the records makes its directory again at any time. So what is prepared takes the place by a rename,
    which fails where something of the other kind stands again.
    """

    def replace(run_dir: Path) -> None:
        path, prepared = run_dir / name, run_dir.parent / "prepared"
        prepared.mkdir() if path.suffix else prepared.touch()
        for attempt in itertools.count():
            with suppress(FileNotFoundError):
                path.rename(run_dir.parent / f"was_{attempt}")
            with suppress(IsADirectoryError, NotADirectoryError):
                prepared.rename(path)
                return

    return replace


@pytest.mark.slow
@pytest.mark.parametrize("every_steps", [1, 3])
def test_the_way_on_that_is_named_is_one_that_is_taken(every_steps: int, tmp_path: Path) -> None:
    """Before the first checkpoint `--resume` alone is refused."""
    run_dir = tmp_path / "runs" / "run"
    more = {"train.name": "run", "train.max_steps": 4, "checkpoint.every_steps": every_steps}
    settings = run_settings(tmp_path, 8, **more)

    def on_step(step: int, step_metrics: Any) -> None:
        if step == 2:
            replaced("tokens")(run_dir)

    with pytest.raises(CheckpointError, match="records cannot be written") as caught:
        train(settings, plugins="null", on_step=on_step)
    arguments = str(caught.value).partition(" --")[2].split(" --")
    assert arguments == (["resume"] if every_steps == 1 else ["resume", "from-start"])
    (run_dir / "tokens").unlink()
    resumed = train(settings, plugins="null", resume=True, from_start="from-start" in arguments)
    assert resumed.steps == 4


def gone(run_dir: Path) -> None:
    run_dir.rename(run_dir.with_name("gone"))


WAY_OUT = r"make room or bring the directory back, then (continue|begin again) with --resume"
WAYS: dict[str, tuple[Callable[[Path], object], str]] = {
    "whole": (gone, f"run/.*': records cannot be written: FileNotFoundError: .*; {WAY_OUT}"),
    "metrics": (replaced("metrics.jsonl"), f"metrics.jsonl': records cannot be written: .*; {WAY_OUT}"),
    "trajectories": (replaced("trajectories"), f"trajectories/step_.*': records cannot be written: .*; {WAY_OUT}"),
    "tokens": (replaced("tokens"), f"tokens/step_.*': records cannot be written: .*; {WAY_OUT}"),
    "checkpoints": (replaced("checkpoints"), "checkpoint of step 3: no directory to write it into: "),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_run_directory_that_goes_ends_the_run_in_one_line(way: str, tmp_path: Path) -> None:
    remove, words = WAYS[way]
    run_dir = tmp_path / "runs" / "run"

    def on_step(step: int, step_metrics: Any) -> None:
        if step == 2:  # those of step 1 are written
            remove(run_dir)

    settings = run_settings(tmp_path, 8, **{"train.name": "run", "train.max_steps": 4, "checkpoint.every_steps": 3})
    with pytest.raises(CheckpointError, match=words) as caught:
        train(settings, plugins="null", on_step=on_step)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("runs/*/checkpoints/.*"))


@pytest.mark.parametrize("kind", ["gone", "a pipe", "without an end"])
@pytest.mark.parametrize("name", ["config.yaml", "plan.json"])
def test_a_checkpoint_reads_no_file_of_the_run(name: str, kind: str, tmp_path: Path) -> None:
    """Another program may remove or replace it: a pipe would be waited for, a device would fill the memory."""
    before: list[bytes] = []

    def on_step(step: int, step_metrics: Any) -> None:
        if step == 2:
            path = tmp_path / "runs" / "run" / name
            before.append(path.read_bytes())
            path.unlink()
            if kind == "a pipe":
                os.mkfifo(path)
            elif kind == "without an end":
                path.symlink_to("/dev/zero")

    settings = run_settings(tmp_path, 8, **{"train.name": "run", "train.max_steps": 3, "checkpoint.every_steps": 3})
    run = train(settings, plugins="null", on_step=on_step)
    assert run.checkpoint is not None
    assert [(run.checkpoint / name).read_bytes()] == before
