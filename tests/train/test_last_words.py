"""The messages with which a run ends."""

from pathlib import Path
from typing import Any

import pytest

from rlcore.errors import WorkerError
from rlcore.testing.runs import run_settings
from rlcore.train import TrainResult, train
from rlcore.train.last_words import how_to_load


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    return run_settings(tmp_path, 8, **{"train.name": "run"})


def run(config: dict[str, Any], *overrides: str, **more: Any) -> TrainResult:
    return train(config, *overrides, plugins=["null"], **more)


@pytest.mark.parametrize(
    ("directory", "lines"),
    [
        ("adapter", ["rlcore export {path} DIRECTORY", 'AutoPeftModelForCausalLM.from_pretrained("{path}/adapter")']),
        ("model", ['AutoModelForCausalLM.from_pretrained("{path}/model")']),
        ("other", []),
    ],
)
def test_the_last_words_name_what_opens_the_model(tmp_path: Path, directory: str, lines: list[str]) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / directory).mkdir(exist_ok=True)
    (tmp_path / directory / "config.json").write_text("{}")
    (tmp_path / directory / "model.safetensors").touch()
    found = how_to_load(tmp_path)
    assert len(found) == len(lines)
    assert all(line.format(path=tmp_path) in text for line, text in zip(lines, found, strict=True))


@pytest.mark.slow
def test_the_last_words_of_a_run_without_a_model_of_transformers_name_nothing_that_would_open_it(
    config: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(config, "train.max_steps=1")
    shown = capsys.readouterr().out
    assert f"checkpoint: {result.checkpoint}" in shown
    assert "from_pretrained" not in shown


@pytest.mark.slow
def test_a_resume_without_a_step_left_says_so_and_names_the_setting_for_more(
    config: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run(config)
    assert "trained 2 steps" in capsys.readouterr().out
    result = run(config, resume=True)
    shown = capsys.readouterr().out
    assert "no step was taken: all 2 steps had been taken already; for more of them raise train.max_steps" in shown
    assert "trained" not in shown
    assert run(config, "train.max_steps=3", resume=True).steps == result.steps + 1
    assert "trained 3 steps" in capsys.readouterr().out


@pytest.mark.slow
def test_a_resume_of_a_run_that_ended_early_says_so(config: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    stop = ("train.max_steps=9", "train.stop.metric=reward/mean", "train.stop.patience=1", "train.stop.min_delta=99")
    run(config, *stop)
    run(config, *stop, resume=True)
    assert "no step was taken: the run had ended after step 2 already" in capsys.readouterr().out


def test_only_an_error_behind_a_step_advises_to_resume_as_it_is(config: dict[str, Any]) -> None:
    fails = "plugins.null.fail_at_update=2"
    with pytest.raises(WorkerError, match=r"; last checkpoint: .*step_1, continue with --resume"):
        run(config, fails, "checkpoint.every_steps=1")
    with pytest.raises(
        WorkerError, match=r"; no step was taken after the last checkpoint, .*step_1; correct the cause"
    ):
        run(config, fails, resume=True)
