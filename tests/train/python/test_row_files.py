"""Rows from Python as lines of JSON, and forms of data that are refused in one line."""

import json
from typing import Any

import datasets
import numpy as np
import pytest

from rlcore.errors import ConfigError
from rlcore.train.python.inputs import gather_inputs
from rlcore.train.python.row_files import check_form, is_rows, rows_as_lines

ROWS = [{"prompt": "one", "n": 1}, {"prompt": [{"role": "user", "content": "two"}], "n": 2}]

DATASET = datasets.Dataset.from_list(ROWS[:1])


def read(lines: bytes) -> list[Any]:
    return [json.loads(line) for line in lines.splitlines()]


def test_lists_and_datasets_give_the_same_rows() -> None:
    rows = [{"prompt": "one", "n": 1}, {"prompt": "zwei\n\u2028ü", "n": 2}]
    dataset = datasets.Dataset.from_list(rows)
    assert is_rows(rows)
    assert is_rows(dataset)
    assert read(rows_as_lines(rows, "data")) == rows == read(rows_as_lines(dataset, "data"))
    assert read(rows_as_lines(ROWS, "data")) == ROWS


def test_numbers_and_arrays_of_numpy_become_numbers_and_lists() -> None:
    rows = [{"prompt": "a", "answer": np.float32(0.5), "many": np.arange(2)}]
    assert read(rows_as_lines(rows, "data")) == [{"prompt": "a", "answer": 0.5, "many": [0, 1]}]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "it has no rows"),
        (["text"], "row 0 is a str; needs a dict"),
        ([{"prompt": "a"}, {"prompt": b"b"}], "row 1, column 'prompt' is a bytes, which is not JSON"),
        ([{1: "a"}], "row 0 has the column 1; needs names that are text"),
        ([{"prompt": "a", "info": [{2: "b"}]}], "row 0, column 'info' has the key 2"),
    ],
)
def test_a_value_that_is_not_a_row_is_named(rows: Any, words: str) -> None:
    with pytest.raises(ConfigError, match="data: ") as refused:
        rows_as_lines(rows, "data")
    assert words in str(refused.value)


class Frame:
    """The part of pandas.DataFrame by which one is known."""

    columns = ("prompt",)

    def to_dict(self, how: str) -> list[dict[str, str]]:
        return []


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (
            datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS[:1])}),
            "the splits train; needs one, such as ds['train']",
        ),
        (DATASET.to_iterable_dataset(), "list(stream.take(1000))"),
        (Frame(), "frame.to_dict('records')"),
        ((row for row in ROWS), "can be read once; needs a list of dicts"),
        (3, "found an int; needs a path, a list of dicts"),
    ],
)
def test_a_form_that_cannot_be_a_source_is_refused_with_what_to_convert_it_to(data: Any, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_form(data, "data")
    assert words in str(refused.value)


def test_columns_and_sources_are_distinguished_by_name() -> None:
    with pytest.raises(ConfigError, match=r"data: 'prompt' is a list of str; needs .* datasets\.Dataset\.from_dict"):
        gather_inputs(None, None, {"prompt": ["a"], "answer": ["b"]}, None, {})
    gather_inputs(None, None, {"sums": [{"prompt": "a"}], "others": "rows.jsonl"}, None, {})
