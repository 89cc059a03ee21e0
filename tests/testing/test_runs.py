"""Comparing runs: line separators inside a text do not end a line, and a torn last line is ignored."""

import json
from pathlib import Path

from rlcore.testing.runs import differing


def write(run: Path, torn: bytes = b"", text: str = "\u2028\x85\x0c") -> Path:
    """A run with one step, one trajectory and a checkpoint of one file."""
    (run / "trajectories").mkdir(parents=True)
    line = json.dumps({"step": 1, "completion": text}, ensure_ascii=False).encode() + b"\n"
    for path in (run / "metrics.jsonl", run / "trajectories" / "step_000001.jsonl"):
        path.write_bytes(line + torn)
    (run / "checkpoints" / "step_1").mkdir(parents=True)
    (run / "checkpoints" / "latest").write_text("step_1")
    return run


def test_runs_whose_texts_hold_any_character_are_compared_line_by_line(tmp_path: Path) -> None:
    one, other = write(tmp_path / "one"), write(tmp_path / "other", b'{"step": 2')
    assert differing(one, other) == []
    assert differing(one, write(tmp_path / "third", text="x")) == [
        "metrics.jsonl, line 1: ['completion']",
        "step_000001.jsonl, line 1: ['completion']",
    ]
