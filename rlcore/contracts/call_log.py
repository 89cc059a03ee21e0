"""The log of calls to functions, services and models: one JSON line per call with question, answer and latency."""

import json
import time
from io import FileIO
from json.encoder import encode_basestring
from pathlib import Path
from typing import Any

from rlcore.errors.redaction import redact

FILE = "reward_calls.jsonl"
CHARACTERS = 20_000
"""The longest query or response; longer ones are truncated."""
HELD_BYTES = 1 << 14
ENCODER = json.JSONEncoder(ensure_ascii=False, default=str)


class CallLog:
    """Appends to `reward_calls.jsonl`. Secrets that the configuration read are replaced by their variables' names."""

    def __init__(self, run_dir: Path, which: str, characters: int) -> None:
        self._path, self._which, self._characters = run_dir / FILE, which, characters
        self._file: FileIO | None = None
        self._lines: list[bytes] = []
        self._held = 0
        """Bytes of the lines that are not written yet."""

    def wants(self, status: str) -> bool:
        """True if calls with this status are kept."""
        return self._which == "all" or (self._which == "failures" and status != "ok")

    def record(self, *, reward: str, id: str, target: str, query: Any, response: Any, status: str, **more: Any) -> None:
        """Log one call; the JSON of `query` and `response` is truncated."""
        if not self.wants(status):
            return
        # The line is built by hand, which takes a fifth of the time of encoding a dict.
        line = (
            f'{{"time": {time.time():.3f}, "reward": {encode_basestring(reward)}, "id": {encode_basestring(id)}, '
            f'"target": {encode_basestring(target)}, "status": {encode_basestring(status)}, '
            f'"query": {encode_basestring(self._cut(query))}, "response": {encode_basestring(self._cut(response))}'
        )
        for name, value in more.items():
            line += f', "{name}": {value if type(value) is int else ENCODER.encode(value)}'
        self._lines.append(redact(line + "}\n").encode("utf-8", "replace"))
        self._held += len(self._lines[-1])
        if self._held >= HELD_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write everything to the operating system, in whole lines: another log may append to the same file."""
        if not self._lines:
            return
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = FileIO(self._path, "a")
        lines, self._lines, self._held = memoryview(b"".join(self._lines)), [], 0
        while lines:
            lines = lines[self._file.write(lines) :]

    def close(self) -> None:
        """Close the file. May be called more than once."""
        self.flush()
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _cut(self, value: Any) -> str:
        text = value.decode(errors="replace") if isinstance(value, bytes) else value
        text = redact(text if isinstance(text, str) else ENCODER.encode(text))
        left_out = len(text) - self._characters
        return text if left_out <= 0 else f"{text[: self._characters]}... ({left_out} more characters)"
