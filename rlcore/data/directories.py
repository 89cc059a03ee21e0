"""Directories with data files, or with the files of `save_to_disk`."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from rlcore.config import SourceConfig
from rlcore.data.json_rows import JSON, JSON_LINES, Row, json_rows
from rlcore.errors import ConfigError, nearest

IN_DIRECTORIES = JSON_LINES | {JSON, ".csv", ".tsv", ".parquet", ".arrow", ".txt", ".gz", ".zst", ".zip", ".bz2", ".xz"}
"""Suffixes of files in a directory from which `datasets` may read rows."""
NEEDED_INSIDE = "needs .jsonl, .json, .csv or .parquet in it, what `save_to_disk` wrote"
MAX_LOOKED = 10_000
"""Files of a directory whose names are looked at."""
KINDS = (JSON, ".csv", ".tsv", ".parquet", ".arrow")
"""Suffixes of the kinds of files of which a directory has one; that of JSON stands for files of lines, too."""
NO_DATA = frozenset({"config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"})
HIDDEN = (".", "__")
"""Beginnings of the names of files and directories that `datasets` leaves out."""
CARDS = ("README.md", ".huggingface.yaml")
"""Files that may name the directory's files of data."""
CHOOSING = frozenset({"data_files", "data_dir"})
"""Options that choose files, and do not say how they are read."""
SPLITS = "dataset_dict.json"
ONE_SPLIT = "state.json"


def has_rows(directory: Path) -> bool:
    """True if a file in the directory, or below it, may hold rows, and for a directory with too many files to look."""
    looked = list(islice(_files_in(directory), MAX_LOOKED))
    return len(looked) == MAX_LOOKED or any(file.suffix.lower() in IN_DIRECTORIES for file in looked)


def _files_in(directory: Path) -> Iterator[Path]:
    return (Path(place, name) for place, _, names in os.walk(directory) for name in names)


def mixture_of(source: SourceConfig, path: Path) -> str:
    """The reason why `datasets` would read some of a directory's files and leave the others out; '' if there is none.

    Nothing is left out by mistake where an option, or the directory's card, chooses the files.
    """
    if not path.is_dir() or _is_saved(path) or CHOOSING & set(source.options) or _card_chooses(path):
        return ""
    kinds: dict[str, Path] = {}
    for file in sorted(islice(_files_in(path), MAX_LOOKED)):
        below, suffix = file.relative_to(path), file.suffix.lower()
        if file.name not in NO_DATA and not any(part.startswith(HIDDEN) for part in below.parts):
            kinds.setdefault(JSON if suffix in JSON_LINES else suffix, below)
    found = [kinds[kind] for kind in KINDS if kind in kinds]
    if len(found) < 2:
        return ""
    return (
        f"has files of more than one kind, such as '{found[0]}' and '{found[1]}'; needs files of one kind, so name a "
        f"file, or choose by options, as in {{data_files: '*{found[0].suffix}'}}"
    )


def _is_saved(path: Path) -> bool:
    return (path / SPLITS).exists() or (path / ONE_SPLIT).exists()


def _card_chooses(path: Path) -> bool:
    return any(b"data_files" in card.read_bytes() for name in CARDS if (card := path / name).is_file())


def refuse_unsaved(source: SourceConfig, path: Path, who: str) -> None:
    """ConfigError for a split that `save_to_disk` did not write, and for settings without effect on its directory."""
    if not path.is_dir() or not _is_saved(path):
        return
    if (path / SPLITS).exists():
        splits = json.loads((path / SPLITS).read_bytes())["splits"]
        if source.split not in splits:
            raise ConfigError(
                f"{who}.split: '{source.path}' has no split '{source.split}'; {nearest(source.split, splits)}"
            )
    else:
        split = json.loads((path / ONE_SPLIT).read_bytes()).get("_split")
        if source.split not in ("train", split):
            saved = f"as split '{split}'" if split else "without a split"
            raise ConfigError(
                f"{who}.split: it is '{source.split}', and '{source.path}' is one dataset, saved {saved}; leave it out"
            )
    for key, value in (("subset", source.subset), ("options", ", ".join(source.options))):
        if value:
            raise ConfigError(
                f"{who}.{key}: {value}: no effect on '{source.path}', which save_to_disk wrote; leave it out"
            )


def json_files(datasets: Any, source: SourceConfig, path: Path, cache_dir: str) -> dict[str, list[Path]]:
    """The files of each split, if all are of JSON and no option says how `datasets` reads them; else none."""
    if set(source.options) - CHOOSING:
        return {}
    builder = datasets.load_dataset_builder(str(path), source.subset or None, cache_dir=cache_dir, **source.options)
    files = {str(split): [Path(file) for file in files] for split, files in (builder.config.data_files or {}).items()}
    every = [file for split in files.values() for file in split]
    is_json = all(file.suffix.lower() in JSON_LINES | {JSON} and file.is_file() for file in every)
    return files if is_json and builder.info.builder_name == "json" else {}


def split_rows(
    datasets: Any, source: SourceConfig, path: Path, files: Mapping[str, Sequence[Path]], who: str
) -> Iterator[Row]:
    """The rows of the files of a split, or of an expression of splits such as train[:10], as each file has them.

    `datasets` would make a date of a text that looks like one, and a float of an integer in a column with floats.
    """

    def rows_of(split: str) -> Iterator[Row]:
        for file in files[split]:
            name = os.path.relpath(file, path.resolve())
            yield from (Row(f"{name} {row.where}", row.values) for row in json_rows(file, who))

    if source.split in files:
        yield from rows_of(source.split)
        return
    rows = {split: list(rows_of(split)) for split in files}
    parts = datasets.ReadInstruction.from_spec(source.split).to_absolute({split: len(rows[split]) for split in rows})
    for part in parts:
        yield from rows[part.splitname][part.from_ : part.to]
