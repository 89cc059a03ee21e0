"""Reads `tokens/` of an rlcore run: safetensors with the standard library, and the vocabulary."""

import array
import codecs
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlcore_view.file_memory import FileMemory, opened
from rlcore_view.json_lines import made_again
from rlcore_view.model import Tokens, ViewError

FORMAT, SCHEMA, VOCABULARY = "rlcore-tokens", 1, "vocabulary.jsonl"
_CODES = {"I32": "i", "I64": "q", "F32": "f", "U8": "B"}
LARGEST = 1 << 30
"""Bytes of a step's file that are taken into memory."""
WITHHELD = "\N{FULL BLOCK}"
"""Replaces tokens that the run did not write because their row's text contains a secret."""

RowId = tuple[str, int, int, int]


@dataclass(frozen=True)
class Vocabulary:
    """The token ids that occur."""

    pieces: Mapping[int, bytes]
    whole: Mapping[int, str]
    """The texts of tokens that consist of whole characters."""


def vocabulary(directory: Path, memory: FileMemory) -> Vocabulary:
    """The vocabulary of the file; empty if it does not exist."""
    path = directory / VOCABULARY
    pieces = dict(made_again(path, lambda entry: (int(entry["id"]), _bytes_of(entry)), memory) if path.exists() else ())
    whole: dict[int, str] = {}
    for id_, piece in pieces.items():
        with suppress(UnicodeDecodeError):
            whole[id_] = piece.decode()
    return Vocabulary(pieces, whole)


def rows_of(path: Path, known: Vocabulary) -> tuple[dict[RowId, Tokens], bool]:
    """(the tokens of each row of a step's file, True if the vocabulary has all of them).

    ViewError for another kind of file or a newer schema.
    """
    about, arrays = _load(path)
    schema = about.get("schema")
    if schema != SCHEMA:
        raise ViewError(f"'{path}': its schema is {schema!r}; this rlcore-view reads {SCHEMA}; install a newer one")
    starts, ids = arrays.pop("row_start"), arrays.pop("token_id")
    position, sampled = arrays.pop("position", None), arrays.pop("sampled", None)
    rows, is_complete = dict[RowId, Tokens](), known.pieces.keys() >= {id_ for id_ in ids if id_ >= 0}
    for number, (prompt, epoch, sample, segment) in enumerate(about["rows"]):
        span = slice(int(starts[number]), int(starts[number + 1]))
        rows[str(prompt), int(epoch), int(sample), int(segment)] = Tokens(
            pieces=_texts(ids[span], known),
            arrays={name: values[span] for name, values in arrays.items()},
            sampled=[*map(bool, sampled[span])] if sampled is not None else (),
            turn=_turns(position[span]) if position is not None else (),
        )
    return rows, is_complete


def _load(path: Path) -> tuple[dict[str, Any], dict[str, "array.array[Any]"]]:
    try:
        with opened(path) as file:
            if (size := os.fstat(file.fileno()).st_size) > LARGEST:
                raise ViewError(f"'{path}': it has {size >> 20} MiB; files of up to {LARGEST >> 20} MiB are shown")
            data = file.read()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        about = json.loads(header.pop("__metadata__")[FORMAT])
        return about, {name: _array(spec, data[8 + length :]) for name, spec in header.items()}
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ViewError(f"'{path}': this is not a file of {FORMAT}: {type(error).__name__}: {error}") from error


def _array(spec: Mapping[str, Any], data: bytes) -> "array.array[Any]":
    values = array.array(_CODES[spec["dtype"]])
    begin, end = spec["data_offsets"]
    values.frombytes(data[begin:end])
    if sys.byteorder == "big":
        values.byteswap()
    return values


def _texts(ids: Sequence[int], known: Vocabulary) -> list[str]:
    """One text per token. A character that spans several tokens belongs to the last one."""
    with suppress(KeyError):
        return [*map(known.whole.__getitem__, ids)]
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return [WITHHELD if id_ < 0 else decoder.decode(known.pieces.get(id_, b"\xef\xbf\xbd")) for id_ in ids]


def _turns(positions: Sequence[int]) -> list[int]:
    if not positions or positions[-1] - positions[0] == len(positions) - 1:  # no gap: they ascend
        return [0] * len(positions)
    turns, turn = list[int](), 0
    for index, position in enumerate(positions):
        turn += index > 0 and position != positions[index - 1] + 1
        turns.append(turn)
    return turns


def _bytes_of(entry: Mapping[str, Any]) -> bytes:
    if "bytes" in entry:
        return bytes.fromhex(str(entry["bytes"]))
    return str(entry.get("text", "")).encode("utf-8", "replace")
