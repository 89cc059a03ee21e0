"""Files of data: JSON that is a list or lines, what is not data, and columns within columns."""

import gzip
import json
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet  # type: ignore[import-untyped]
import pytest

from rlcore.config import DataConfig, SourceConfig
from rlcore.data import load_prompts
from rlcore.data.rows import check_path, read_rows
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
        ("rows.json", "[1]", "row 0 is of type int; needs an object"),
        (
            "rows.json",
            '[{"prompt": "a"},\n {"prompt": }]',
            r"rows\.json' is not JSON: Expecting value: line 2 column 13",
        ),
        ("gone.json", None, r"found no file .*gone\.json"),
        ("rows.txt", "a", r"is not a kind of file that is read; needs \.jsonl"),
        ("rows.jsonl.gz", None, "is not a kind of file that is read"),
        ("nowhere", None, "found no directory"),
    ],
)
def test_a_file_that_is_not_data_is_refused_without_a_look_at_the_hub(
    tmp_path: Path, name: str, text: str | None, message: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_rows(SourceConfig(path=str(tmp_path / name)), "data.sources.x")


ROWS = b'{"prompt": "a"}\n{"prompt": "b"}\n'


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("nul.jsonl", b'{"prompt": "a\0"}\n', "line 1 is not JSON: Invalid control character"),
        ("utf16.jsonl", ROWS.decode().encode("utf-16"), r"utf16\.jsonl' is in UTF-16; needs UTF-8: iconv"),
        ("utf16.json", ROWS.decode().encode("utf-16"), r"utf16\.json' is in UTF-16; needs UTF-8: iconv"),
        ("latin.jsonl", '{"prompt": "grüß"}'.encode("latin-1"), "line 1 is not JSON: 'utf-8' codec"),
        ("packed.jsonl", gzip.compress(ROWS), r"packed\.jsonl' is compressed by gzip; unpack it"),
        ("packed.json", gzip.compress(ROWS), r"packed\.json' is compressed by gzip; unpack it"),
        (
            "twice.jsonl",
            ROWS + b'{"prompt": "a", "prompt": "b"}\n',
            "line 3 is not JSON: the key 'prompt' occurs twice",
        ),
        ("twice.json", b'[\n{"prompt": "a",\n"x": {"y": 1, "y": 2}}]', "the key 'y' occurs twice in one object"),
        ("digits.jsonl", b'{"prompt": "a", "answer": ' + b"9" * 5000 + b"}", "line 1 is not JSON: Exceeds the limit"),
        (
            "deep.jsonl",
            b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
            "line 1 is not JSON: maximum recursion",
        ),
        ("torn.jsonl", ROWS[:-6], "line 2 is not JSON"),
        ("carriage.jsonl", ROWS.replace(b"\n", b"\r"), "line 1 is not JSON: Extra data"),
        ("blank.jsonl", b"\n \n", "has no rows"),
        ("header.csv", b"prompt,answer\n", "has no rows in split 'train'"),
        ("empty.csv", b"", "EmptyDataError: No columns to parse"),
        ("open.csv", b'prompt,answer\n"a,b\nc,d\n', "ParserError: .*EOF inside string"),
        ("latin.csv", "prompt\ngrüß\n".encode("latin-1"), "UnicodeDecodeError: 'utf-8' codec"),
        ("ragged.csv", b"prompt,answer\na,1\nb,2,3,4\n", "ParserError: .*Expected 2 fields in line 3, saw 4"),
        ("text.parquet", ROWS, "ArrowInvalid: Parquet magic bytes not found"),
    ],
    ids=lambda value: value if isinstance(value, str) and "." in value[-8:] and " " not in value else "",
)
def test_a_damaged_or_ambiguous_file_is_one_line_that_says_what_is_wrong(
    tmp_path: Path, name: str, data: bytes, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    library = logging.getLogger("datasets")  # it does not propagate
    library.addHandler(caplog.handler)
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ConfigError, match=message) as caught:
        read_rows(SourceConfig(path=str(tmp_path / name)), "data.sources.x")
    library.removeHandler(caplog.handler)
    assert caplog.messages == []
    assert name in str(caught.value)
    one_line = " ".join(str(caught.value).split())
    assert len(one_line) < 500


@pytest.mark.parametrize("name", ["rows.csv", "."])
def test_a_csv_file_whose_rows_have_more_fields_than_the_header_is_refused(tmp_path: Path, name: str) -> None:
    source = SourceConfig(path=str(tmp_path / name))
    for text, found in (
        ("prompt,answer\nCapital of France?,Paris,\nCapital of Italy?,Rome,\n", "3 fields in its first row and 2"),
        ("prompt\nAdd 1, then 2, then 3\n", "3 fields in its first row and 1"),
    ):
        (tmp_path / "rows.csv").write_text(text)
        with pytest.raises(
            ConfigError, match=rf"^x: '.*' has {found} in its header; needs .* options.index_col=false$"
        ):
            read_rows(source, "x")
    (tmp_path / "rows.csv").write_text('prompt,answer\na,1,\n"b, c",2,\n')
    rows = read_rows(replace(source, options={"index_col": False}), "x")
    assert [row.values for row in rows] == [{"prompt": "a", "answer": 1}, {"prompt": "b, c", "answer": 2}]


@pytest.mark.parametrize("name", ["rows.csv", "."])
def test_a_csv_file_may_have_a_column_with_the_name_of_an_index(tmp_path: Path, name: str) -> None:
    (tmp_path / "rows.csv").write_text("prompt,__index_level_0__\na,1\n")
    [row] = read_rows(SourceConfig(path=str(tmp_path / name)), "x")
    assert row.values == {"prompt": "a", "__index_level_0__": 1}


def test_a_parquet_file_without_rows_is_refused(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())}), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"a\.parquet' has no rows"):
        read_rows(SourceConfig(path=str(tmp_path / "a.parquet")), "data.sources.x")


@pytest.mark.parametrize("data", [b"\xef\xbb\xbf" + ROWS, ROWS.replace(b"\n", b"\r\n"), ROWS[:-1]])
def test_a_mark_of_byte_order_and_line_breaks_of_other_systems_are_read(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "rows.jsonl").write_bytes(data)
    rows = read_rows(SourceConfig(path=str(tmp_path / "rows.jsonl")), "data.sources.x")
    assert [row.values["prompt"] for row in rows] == ["a", "b"]


def test_a_large_file_of_json_is_not_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlcore.data.json_rows.MAX_LIST", 1 << 10)
    monkeypatch.setattr("rlcore.data.json_rows.MAX_LINE", 1 << 9)
    source = SourceConfig(path=str(tmp_path / "rows.json"))
    (tmp_path / "rows.json").write_text('{"prompt": "a"}\n' * 100)
    assert len(read_rows(source, "x")) == 100
    (tmp_path / "rows.json").write_text(" [" + ", ".join(['{"prompt": "a"}'] * 100) + "]")
    with pytest.raises(ConfigError, match=r"^x: '.*' is a list of more than 0 MiB.*into a \.jsonl file$"):
        read_rows(source, "x")
    (tmp_path / "rows.json").write_bytes(bytes(2 << 10))
    with pytest.raises(ConfigError, match="line 1 has more than 0 MiB"):
        read_rows(source, "x")


def test_a_line_without_an_end_is_not_read_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "holes.jsonl").open("wb") as file:
        file.write(ROWS)
        file.truncate(1 << 40)
    monkeypatch.setattr("rlcore.data.json_rows.MAX_LINE", 1 << 20)
    with pytest.raises(ConfigError, match="line 3 has more than 1 MiB; divide it"):
        read_rows(SourceConfig(path=str(tmp_path / "holes.jsonl")), "data.sources.x")


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (os.mkfifo, "is a pipe"),
        (Path.mkdir, "is a directory"),
        (lambda path: path.symlink_to(path), "is a link to .* which does not exist"),
    ],
    ids=["pipe", "dir", "loop"],
)
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv", "rows.parquet"])
def test_what_is_not_a_file_is_not_opened(
    tmp_path: Path, make: Callable[[Path], None], problem: str, name: str
) -> None:
    make(tmp_path / name)
    with pytest.raises(ConfigError, match=problem):
        read_rows(SourceConfig(path=str(tmp_path / name)), "data.sources.x")


@pytest.mark.parametrize("name", ["x" * 300 + ".jsonl", "x" * 300])
def test_a_name_that_no_file_has_is_one_line(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.sources\.x\.path: OSError: .*File name too long"):
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


def test_a_path_that_holds_no_rows_says_what_it_is(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "rows.jsonl").mkdir()
    (tmp_path / "nothing").mkdir()
    (tmp_path / "pictures" / "below").mkdir(parents=True)
    (tmp_path / "pictures" / "below" / "a.png").touch()
    (tmp_path / "link.jsonl").symlink_to("gone.jsonl")
    for name, message in {
        "pipe.jsonl": "is a pipe, which can be read only once; needs a file",
        "pipe": "is a pipe",
        "rows.jsonl": "is a directory, though its name is that of a file",
        "nothing": "is an empty directory; needs one with data files, or a file",
        "pictures": "is a directory without files of rows; needs .jsonl, .json, .csv or .parquet in it, ",
        "link.jsonl": "is a link to 'gone.jsonl', which does not exist",
        "/dev/null": "is a device or a socket; needs a file",
    }.items():
        with pytest.raises(ConfigError, match=rf"^data\.sources\.x\.path: '.*{name}' {message}"):
            check_path(SourceConfig(path=str(tmp_path / name)), "data.sources.x")


def test_a_directory_with_a_file_of_rows_at_any_depth_is_not_refused(tmp_path: Path) -> None:
    (tmp_path / "rows" / "data").mkdir(parents=True)
    (tmp_path / "rows" / "README.md").touch()
    (tmp_path / "rows" / "data" / "train-0.parquet").touch()
    assert check_path(SourceConfig(path=str(tmp_path / "rows")), "data.sources.x") == tmp_path / "rows"


def test_a_directory_of_files_without_a_line_has_no_rows(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "a.jsonl").touch()
    sources = {"x": SourceConfig(path=str(tmp_path / "rows"))}
    with pytest.raises(ConfigError, match=r"^data\.sources\.x: .* has no rows"):
        load_prompts(sources, DataConfig(sources=sources))


def test_rows_without_a_prompt_are_counted_and_the_first_is_named(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": ""}\n\n{"prompt": null}\n')
    sources = {"x": SourceConfig(path=str(file))}
    with pytest.raises(
        ConfigError, match=r"line 2, as 2 of 3 rows, has nothing in column 'prompt'.*; remove such rows"
    ):
        load_prompts(sources, DataConfig(sources=sources))


def test_a_directory_of_json_files_keeps_what_is_in_them(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    first = {"prompt": "a", "answer": "2020-01-01", "n": 1, "large": 10**29}
    (tmp_path / "below" / "train-1.jsonl").write_text("\n" + json.dumps(first) + "\n")
    (tmp_path / "train-2.json").write_text(json.dumps([{"prompt": "b", "answer": "02101", "n": 0.5}]))
    (tmp_path / "test.ndjson").write_text('{"prompt": "c"}\n{"prompt": "d"}\n')
    (tmp_path / "README.md").touch()
    source = SourceConfig(path=str(tmp_path))
    found = sorted(read_rows(source, "x"))
    assert [row.where for row in found] == ["below/train-1.jsonl line 2", "train-2.json row 0"]
    assert [row.values for row in found] == [first, {"prompt": "b", "answer": "02101", "n": 0.5}]
    assert type(found[0].values["n"]) is int
    for split, prompts in (("test", "cd"), ("test[1:]", "d"), ("test[:50%]+test[-1:]", "cd")):
        rows = read_rows(replace(source, split=split), "x")
        assert "".join(row.values["prompt"] for row in rows) == prompts
    [chosen] = read_rows(replace(source, options={"data_files": "below/*.jsonl"}), "x")
    assert chosen.values == first
    with pytest.raises(ConfigError, match=r"^x: dataset '.*': ValueError: Unknown split \"tset\".*'train', 'test'"):
        read_rows(replace(source, split="tset"), "x")
    (tmp_path / "test.ndjson").write_text("broken\n")
    with pytest.raises(ConfigError, match=r"^x: '.*/test\.ndjson' line 1 is not JSON"):
        read_rows(replace(source, split="test"), "x")


def test_options_of_the_library_let_it_read_a_directory_of_json_files(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text('{"data": [{"prompt": "a"}]}')
    [row] = read_rows(SourceConfig(path=str(tmp_path), options={"field": "data"}), "x")
    assert row.values == {"prompt": "a"}


def test_a_directory_with_files_of_several_kinds_is_refused(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "a.jsonl").write_text('{"prompt": "a"}\n')
    for ignored in ("config.json", ".hidden.parquet", "LICENSE.txt", "a.ndjson"):
        (tmp_path / ignored).write_text("")
    source = SourceConfig(path=str(tmp_path))
    assert len(read_rows(source, "x")) == 1
    (tmp_path / "b.csv").write_text("prompt\nb\n")
    with pytest.raises(
        ConfigError, match=r"^x\.path: '.*' has files of more than one kind, such as 'a\.ndjson' and 'b\.csv'; needs"
    ):
        check_path(source, "x")
    [row] = read_rows(replace(source, options={"data_files": "*.csv"}), "x")
    assert row.values == {"prompt": "b"}
    (tmp_path / "README.md").write_text("---\nconfigs:\n- config_name: default\n  data_files: b.csv\n---\n")
    [row] = read_rows(source, "x")
    assert row.values == {"prompt": "b"}
    for file in ("README.md", "a.ndjson", "below/a.jsonl"):
        (tmp_path / file).unlink()
    assert read_rows(source, "x") == [row]


def test_a_saved_dataset_refuses_a_split_that_it_does_not_have_and_settings_without_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # writing, tqdm starts a thread that stays
    rows = datasets.Dataset.from_dict({"prompt": ["a"]}, split="test")
    datasets.DatasetDict({"test": rows}).save_to_disk(tmp_path / "splits")
    rows.save_to_disk(tmp_path / "named")
    datasets.Dataset.from_dict({"prompt": ["a"]}).save_to_disk(tmp_path / "plain")
    monkeypatch.undo()
    for name, split in (("splits", "test"), ("named", "test"), ("named", "train"), ("plain", "train")):
        source = SourceConfig(path=str(tmp_path / name), split=split)
        assert len(read_rows(source, "x")) == 1
        for settings in ({"subset": "main"}, {"options": {"main": 1}}):
            with pytest.raises(
                ConfigError, match=r"^x\.(subset|options): main: no effect .* save_to_disk wrote; leave"
            ):
                check_path(replace(source, **settings), "x")
    for name, message in {
        "splits": r"'.*' has no split 'tset'; did you mean 'test'\? choose from: test",
        "named": "it is 'tset', and '.*' is one dataset, saved as split 'test'; leave it out",
        "plain": "it is 'tset', and '.*' is one dataset, saved without a split; leave it out",
    }.items():
        with pytest.raises(ConfigError, match=rf"^x\.split: {message}$"):
            check_path(SourceConfig(path=str(tmp_path / name), split="tset"), "x")
