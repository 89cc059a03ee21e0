"""Reads plain JSONL: each line has `messages`, and may have `reward` or `score`, `step`, `id`, and anything else."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlcore_view.json_lines import first_record, made_of, number_or_none, score_or_none
from rlcore_view.model import Run, Sample

_KNOWN = {"messages", "reward", "score", "step", "id"}


def recognises(path: Path) -> bool:
    """True for a .jsonl file whose first line has a list of messages."""
    first = first_record(path) if path.is_file() and path.suffix == ".jsonl" else None
    return first is not None and isinstance(first.get("messages"), list)


def read(path: Path) -> Run:
    """Every line as a sample; the messages before the assistant's first one are its prompt."""
    seen: dict[tuple[int, str], int] = {}
    samples = list(made_of(path, lambda record: _sample(record, seen)))
    return Run(name=path.stem, format="messages", samples=samples)


def _sample(record: Mapping[str, Any], seen: dict[tuple[int, str], int]) -> Sample:
    messages = record["messages"]
    roles = [message.get("role") for message in messages]
    begin = roles.index("assistant") if "assistant" in roles else len(messages)
    prompt = str(record.get("id") or messages[:begin])
    step = int(number_or_none(record.get("step")) or 0)
    sample = seen[step, prompt] = seen.get((step, prompt), -1) + 1
    return Sample(
        step=step,
        prompt_id=prompt,
        sample=sample,
        prompt=messages[:begin],
        completion=messages[begin:],
        score=score_or_none(record.get("score", record.get("reward"))),
        info={name: value for name, value in record.items() if name not in _KNOWN},
    )
