"""A data source for tests."""

import json
from pathlib import Path


def write_prompts(path: Path, num: int, text: str = "Say something, number {index}.") -> Path:
    """A .jsonl file of `num` distinct prompts, whose answer is their index; returns the path."""
    rows = [{"prompt": text.format(index=index), "answer": str(index)} for index in range(num)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path
