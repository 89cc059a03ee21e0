"""Prompts that training leaves out are counted before a run starts, with an example and the key that changes it."""

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from rlcore.cli import main
from rlcore.errors import ConfigError
from rlcore.plugins.planning import plan_run
from rlcore.report import open_telemetry
from rlcore.runtime import data_preview
from rlcore.runtime.data_preview import DataPreview, preview_data
from rlcore.testing.runs import run_settings


def preview(directory: Path, rows: list[dict[str, Any]], *overrides: str, fn: str = "count_letter") -> DataPreview:
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = run_settings(directory, 4, **{"reward.functions.letters.fn": fn})
    settings["data.sources.all.path"] = str(directory / "rows.jsonl")
    return preview_data(plan_run([settings], ["model.tokenizer=bytes", *overrides], ["null"]))


ROWS = [{"prompt": f"say {index}", "answer": "a"} for index in range(19)]
LONG = {"prompt": "a very long question " * 100, "answer": "a"}


def test_prompts_that_are_too_long_are_counted_with_an_example_and_the_key(tmp_path: Path) -> None:
    found = preview(tmp_path, [*ROWS, LONG, LONG], "train.prompts_per_step=1")
    assert found.sources[0].too_long == 2
    assert found.steps_per_epoch == 19, "those that are left out are not counted"
    assert found.notes[-1] == (
        "data.sources.all: prompts longer than data.max_prompt_tokens=1024, which training leaves out: at least 2 of "
        "21, such as all/19 (2100 tokens, 'a very long question a very long questio'); raise it, or shorten them"
    )
    assert not any("longer" in note for note in preview(tmp_path, [*ROWS, LONG], "data.max_prompt_tokens=2100").notes)


def test_a_source_all_of_whose_prompts_are_too_long_is_refused_by_plan(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"every one of 19 prompts is longer than .*=4, the shortest has 5 tokens"):
        preview(tmp_path, ROWS, "data.max_prompt_tokens=4")


def test_counting_is_bounded_and_the_longest_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_preview, "MAX_COUNTED", 1)
    found = preview(tmp_path, [*ROWS, *([LONG] * 20)])
    assert found.sources[0].too_long == data_preview.NUM_LONGEST
    assert found.longest_tokens == 2100


def test_half_a_character_in_a_prompt_counts_as_in_training(tmp_path: Path) -> None:
    words = Tokenizer(WordLevel({"say": 0, "?": 1}, unk_token="?"))
    words.pre_tokenizer = WhitespaceSplit()
    words.save(str(tmp_path / "tokenizer.json"))
    found = preview(tmp_path, [{"prompt": "say \ud83d say"}], f"model.tokenizer={tmp_path}")
    assert found.longest_tokens == 3
    assert preview(tmp_path, [{"prompt": "say \ud83d say"}]).longest_tokens == 9


def test_rows_without_the_answer_that_a_function_takes_are_counted(tmp_path: Path) -> None:
    some = [*ROWS[:3], {"prompt": "say no more"}, {"prompt": "or less", "answer": None}]
    note = (
        "data.sources.all: prompts without an answer: 2 of 5, such as all/3 ('say no more'), and "
        "reward.functions.letters takes one; fill it in, or leave them out"
    )
    assert note in preview(tmp_path, some, fn="exact_match").notes
    assert not any("answer" in note for note in preview(tmp_path, some).notes), "count_letter takes no answer"
    assert not any("answer" in note for note in preview(tmp_path, ROWS, fn="exact_match").notes)


def test_plan_prints_what_is_left_out(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*ROWS, LONG]))
    settings = run_settings(tmp_path, 4)
    settings["data.sources.all.path"] = str(tmp_path / "rows.jsonl")
    settings["model.tokenizer"] = "bytes"
    assert main(["plan", "--plugin", "null", *(f"{key}={json.dumps(value)}" for key, value in settings.items())]) == 0
    assert "which training leaves out: at least 1 of 20, such as all/19" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("window", "overrides", "refused"),
    [
        (20, ["rollout.max_tokens=14"], ""),
        (19, ["rollout.max_tokens=14"], "rollout.max_tokens=14 together 20, but .* holds 19; lower .* below 13, or"),
        (5, ["rollout.max_tokens=14"], "but the model's window holds 5; lower data.max_prompt_tokens below 6 to leave"),
        (19, ["rollout.max_tokens=1", "eval.max_tokens=15"], "'heldout/0' has 5 tokens .* eval.max_tokens=15 together"),
        (19, ["rollout.max_tokens=14", "data.max_prompt_tokens=5"], ""),
        (0, ["rollout.max_tokens=14"], ""),
        ("a", ["rollout.max_tokens=14"], ""),
    ],
)
def test_a_response_for_which_the_window_has_no_room_is_refused_by_plan(
    tmp_path: Path, window: object, overrides: list[str], refused: str
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"text_config": {"max_position_embeddings": window}}))
    (tmp_path / "heldout.jsonl").write_text(json.dumps({"prompt": "hello"}) + "\n")
    heldout = f"eval.sources={{heldout: {{path: {tmp_path / 'heldout.jsonl'}}}}}"
    settings = [f"model.path={tmp_path / 'model'}", heldout, *overrides]
    with pytest.raises(ConfigError, match=refused) if refused else nullcontext():
        assert preview(tmp_path, [{"prompt": "say it"}, {"prompt": "say"}], *settings).sources


def test_plan_notes_a_tracker_that_is_not_installed_and_a_dry_run_refuses_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    settings = run_settings(tmp_path, 4) | {"track.to": "[wandb]"}
    arguments = ["--plugin", "null", *(f"{key}={value}" for key, value in settings.items())]
    line = "track.to: tracker wandb needs wandb, which is not installed; install it with: pip install wandb"
    assert main(["plan", *arguments]) == 0
    assert f"note: {line}" in " ".join(capfd.readouterr().out.split())
    assert main(["train", "--dry-run", *arguments]) == 2
    assert line in capfd.readouterr().err
    monkeypatch.setattr(open_telemetry, "NEEDED", "surely_not_here")
    assert main(["train", "--dry-run", *arguments, "track.to=[]", "track.open_telemetry=true"]) == 2
    assert "the OpenTelemetry SDK is not installed" in capfd.readouterr().err
