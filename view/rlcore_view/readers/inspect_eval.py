"""Reads inspect's `.eval` logs: a zip file with a JSON file per sample."""

import json
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from rlcore_view.json_lines import fields_expected, score_or_none
from rlcore_view.model import Event, Run, Sample, ViewError

LARGEST_SAMPLE, LARGEST_LOG = 256 << 20, 2 << 30
"""Most unpacked bytes of one file and of all together: a malicious zip file could fill the memory."""
_ZSTANDARD, _LOCAL_HEADER = 93, 30
_GRADES = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}
_ATTACHMENT = "attachment://"
_KINDS = {"model": "generate", "tool": "tool", "score": "reward"}


def recognises(path: Path) -> bool:
    """True for a zip file with inspect's `header.json`, or the journal of an unfinished log."""
    if not path.is_file() or not zipfile.is_zipfile(path):
        return False
    try:
        with zipfile.ZipFile(path) as log:
            return bool({"header.json", "_journal/start.json"} & set(log.namelist()))
    except (zipfile.BadZipFile, OSError):
        return False


def read(path: Path) -> Run:
    """Every sample. Groups follow `epochs`; the score is the mean of the scorers' numbers."""
    samples, events = list[Sample](), list[Event]()
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            log = _Log(archive, file)
            names = {info.filename: info for info in archive.infolist()}
            header = log.object_of(names.get("header.json") or names["_journal/start.json"])
            for name, info in names.items():
                if name.startswith("samples/") and name.endswith(".json"):
                    with fields_expected(f"'{path}', {name}"):
                        sample = _sample(record := log.object_of(info))
                        events += _events(record, sample)
                    samples.append(sample)
    except (OSError, zipfile.BadZipFile, KeyError) as error:
        raise ViewError(f"'{path}': this is not a whole log of inspect: {error}") from error
    evaluated = header.get("eval") or {}
    name = f"{evaluated.get('task', path.stem)}: {evaluated.get('model', '')}"
    notes = [f"the log's status is {header['status']}"] if header.get("status") not in (None, "success") else []
    return Run(name, "inspect log", samples, config=json.dumps(evaluated, indent=1), events=events, notes=notes)


class _Log:
    """The members of a log, unpacked within a limit for each and for all together."""

    def __init__(self, archive: zipfile.ZipFile, file: IO[bytes]) -> None:
        self._archive, self._file, self._left = archive, file, LARGEST_LOG

    def object_of(self, info: zipfile.ZipInfo) -> dict[str, Any]:
        """The JSON object of a member; ViewError if it exceeds the limits."""
        limit = min(LARGEST_SAMPLE, self._left)
        data = (self._zstandard if info.compress_type == _ZSTANDARD else self._deflated)(info, limit)
        if len(data) > limit:
            raise ViewError(
                f"'{self._file.name}': {info.filename} is larger than {LARGEST_SAMPLE >> 20} MiB, or the log than "
                f"{LARGEST_LOG >> 20} MiB; take samples out of it with inspect"
            )
        self._left -= len(data)
        try:
            found = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ViewError(f"'{self._file.name}': {info.filename} is not JSON: {error}") from error
        return found if isinstance(found, dict) else {}

    def _deflated(self, info: zipfile.ZipInfo, limit: int) -> bytes:
        try:
            with self._archive.open(info) as member:
                return member.read(limit + 1)
        except (NotImplementedError, RuntimeError, zlib.error) as error:
            raise ViewError(f"'{self._file.name}': {info.filename} cannot be unpacked: {error}") from error

    def _zstandard(self, info: zipfile.ZipInfo, limit: int) -> bytes:
        try:
            import pyarrow  # type: ignore[import-untyped]
        except ImportError as error:
            raise ViewError(f"'{self._file.name}': unpacking Zstandard needs pyarrow; pip install pyarrow") from error
        self._file.seek(info.header_offset)
        head = self._file.read(_LOCAL_HEADER)
        self._file.seek(int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little"), 1)
        packed = pyarrow.BufferReader(self._file.read(info.compress_size))
        try:
            with pyarrow.CompressedInputStream(packed, "zstd") as stream:
                return bytes(stream.read(limit + 1))
        except (OSError, pyarrow.ArrowException) as error:
            raise ViewError(f"'{self._file.name}': {info.filename} cannot be unpacked: {error}") from error


def _sample(record: Mapping[str, Any]) -> Sample:
    texts = record.get("attachments") or {}
    messages = record["messages"]
    begin = next((at for at, message in enumerate(messages) if message.get("role") == "assistant"), len(messages))
    scores = record.get("scores") or {}
    numbers = {name: _number(score.get("value")) for name, score in scores.items()}
    components = {name: value for name, value in numbers.items() if value is not None}
    output, error = record.get("output") or {}, record.get("error")
    choices = output.get("choices") or [{}]
    return Sample(
        step=0,
        prompt_id=str(record["id"]),
        sample=int(record["epoch"]) - 1,
        prompt=[_message(message, texts) for message in messages[:begin]],
        completion=[_message(message, texts) for message in messages[begin:]],
        score=sum(components.values()) / len(components) if components else None,
        answer=record.get("target"),
        components=components,
        num_sampled=sum(int(use.get("output_tokens") or 0) for use in (record.get("model_usage") or {}).values()),
        truncated=choices[0].get("stop_reason") == "max_tokens" or bool(record.get("limit")),
        status="failed" if error else "ok",
        info={
            "error": (error or {}).get("message"),
            "explanations": {name: score.get("explanation") for name, score in scores.items()},
            "metadata": record.get("metadata"),
        },
    )


def _number(value: Any) -> float | None:
    return _GRADES.get(value) if isinstance(value, str) else score_or_none(value)


def _message(message: Mapping[str, Any], texts: Mapping[str, str]) -> dict[str, Any]:
    """A message with its long texts, which the log stores separately."""
    content = message.get("content")
    if isinstance(content, str):
        content = texts.get(content.removeprefix(_ATTACHMENT), content)
    made = {"role": message.get("role"), "content": content}
    if message.get("function"):
        made["name"] = message["function"]
    if calls := message.get("tool_calls"):
        made["tool_calls"] = [{"name": call.get("function"), "arguments": call.get("arguments")} for call in calls]
    return made


def _events(record: Mapping[str, Any], sample: Sample) -> Iterator[Event]:
    for event in record.get("events") or ():
        kind = _KINDS.get(str(event.get("event")))
        if kind and event.get("timestamp") and event.get("completed"):
            start, end = (datetime.fromisoformat(str(event[side])).timestamp() for side in ("timestamp", "completed"))
            identity = (sample.prompt_id, 0, sample.sample, 0)
            row = f"{sample.prompt_id} sample {sample.sample}"
            yield Event(str(event.get("function") or kind), kind, start, max(0.0, end - start), row, 0, identity)
