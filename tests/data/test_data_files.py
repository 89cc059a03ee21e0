"""Files of data: JSON that is a list or lines, what is not data, and columns within columns."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rlcore.config import DataConfig, SourceConfig
from rlcore.data import load_prompts
from rlcore.data.rows import read_rows
from rlcore.errors import ConfigError


@pytest.mark.parametrize("text", ['[{"prompt": "a"}, {"prompt": "b"}]', '{"prompt": "a"}\n{"prompt": "b"}\n'])
def test_a_json_file_is_a_list_of_objects_or_one_per_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "rows.json").write_text(text)
    rows = read_rows(SourceConfig(path=str(tmp_path / "rows.json")), "data.sources.x")
    assert [row.values["prompt"] for row in rows] == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("rows.json", "{}", "is an object; needs a list of objects"),
        ("rows.json", "[1]", "row 0 is of type int, needed is an object"),
        ("gone.json", None, r"there is no file .*gone\.json"),
        ("rows.txt", "a", r"is not a kind of file that is read; needs \.jsonl"),
        ("rows.jsonl.gz", None, "is not a kind of file that is read"),
        ("nowhere", None, "there is no directory"),
    ],
)
def test_a_file_that_is_not_data_is_refused_without_a_look_at_the_hub(
    tmp_path: Path, name: str, text: str | None, message: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_rows(SourceConfig(path=str(tmp_path / name)), "data.sources.x")


def test_a_column_may_be_a_path_into_objects(tmp_path: Path) -> None:
    row = {"input": {"text": "say a"}, "reward_model": {"ground_truth": "a"}, "a.b": 1}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    source = SourceConfig(
        path=str(tmp_path / "rows.jsonl"), prompt_column="input.text", answer_column="reward_model.ground_truth"
    )
    data = DataConfig(sources={"x": source})
    [prompt] = load_prompts(data.sources, data)["x"]
    assert (prompt.messages[0]["content"], prompt.answer, prompt.conversational) == ("say a", "a", False)
    wrong = replace(source, answer_column="reward_model.groundtruth")
    with pytest.raises(ConfigError, match=r"column 'reward_model' has no 'groundtruth'; did you mean 'ground_truth'"):
        load_prompts({"x": wrong}, data)
