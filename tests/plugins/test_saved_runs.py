"""Runs that are opened by any path of their directory."""

from pathlib import Path

import pytest

from rlcore.plugins.saved_run import open_run, open_to_resume


def test_a_run_is_opened_from_a_directory_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "runs" / "mine"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").touch()
    monkeypatch.chdir(run / "checkpoints")
    assert open_run(Path("..")).path == open_to_resume(Path("..")).path == run
    assert open_run(Path("../../mine/checkpoints")).path == run
    assert open_to_resume(Path("..")).settings()["train.name"] == "mine"
