"""Reads tinker-cookbook: `iteration_<n>/<split>_rollout_summaries.jsonl`, a line per trajectory, and metrics."""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rlcore_view.json_lines import first_record, made_of, number_or_none, score_or_none
from rlcore_view.model import Run, Sample

_FILE = "*_rollout_summaries.jsonl"
_ITERATION = re.compile(r"iteration_(\d+)")
_METRICS = {
    "env/all/reward/total": "reward/mean",
    "env/all/ac_tokens_per_turn": "completion/length_mean",
    "optim/entropy": "policy/entropy",
}
"""Their metric names, and the equivalent names of the overview."""


def recognises(path: Path) -> bool:
    """True for a file of rollout summaries, or a log directory with some."""
    files = _files(path)
    first = first_record(files[0]) if files else None
    return first is not None and {"group_idx", "traj_idx", "steps"} <= first.keys()


def read(path: Path) -> Run:
    """Every trajectory, with its text if the file has it; otherwise only the first groups' logtree has texts."""
    seen: dict[tuple[int, str, str], list[int]] = {}
    samples = [sample for file in _files(path) for sample in made_of(file, partial(_sample, file=file, seen=seen))]
    silent = sum(not sample.completion for sample in samples)
    notes = [f"{silent} of {len(samples)} trajectories were recorded without their text"] if silent else []
    metrics = path / "metrics.jsonl"
    return Run(
        name=path.resolve().name,
        format="tinker-cookbook rollout summaries",
        samples=samples,
        metrics=list(made_of(metrics, _metrics)) if metrics.is_file() else [],
        config=(path / "config.json").read_text("utf-8", "replace") if (path / "config.json").is_file() else "",
        notes=notes,
    )


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path] if path.match(_FILE) else []
    return sorted({*path.glob(_FILE), *path.glob(f"iteration_*/{_FILE}")})


def _metrics(record: Mapping[str, Any]) -> dict[str, float | None]:
    step = record.get("step", record.get("progress/batch"))
    found = {_METRICS.get(name, name): number_or_none(value) for name, value in record.items()}
    return {**found, "step": number_or_none(step)}


def _sample(record: Mapping[str, Any], file: Path, seen: dict[tuple[int, str, str], list[int]]) -> Sample:
    steps = record["steps"]
    messages = _messages(record, steps)
    begin = next((at for at, message in enumerate(messages) if message.get("role") == "assistant"), len(messages))
    named = _ITERATION.search(str(file))
    split, group = str(record.get("split", "train")), int(record["group_idx"])
    numbers = {**(record.get("trajectory_metrics") or {})}
    for step in steps:
        numbers |= step.get("metrics") or {}
    step, lane = int(record.get("iteration", named[1] if named else 0)), "train" if split == "train" else "eval"
    prompt = _prompt_id(messages[:begin]) or f"{split}/{record.get('iteration')}/{group}"
    same = seen.setdefault((step, lane, prompt), [group])  # groups whose prompts end in the same words
    if group not in same:
        same.append(group)
    return Sample(
        step=step,
        lane=lane,
        source=", ".join(map(str, record.get("tags") or ())),
        prompt_id=prompt if group == same[0] else f"{prompt} ({same.index(group) + 1})",
        sample=int(record["traj_idx"]),
        prompt=messages[:begin],
        completion=messages[begin:],
        score=score_or_none(record["total_reward"]),
        components={name: number for name, value in numbers.items() if (number := number_or_none(value)) is not None},
        num_sampled=sum(int(step.get("ac_len") or 0) for step in steps),
        truncated=any(step.get("stop_reason") == "length" for step in steps),
        info={"steps": [{name: step.get(name) for name in ("reward", "logs", "ac_len")} for step in steps]},
    )


def _messages(record: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    whole = record.get("conversation")
    if isinstance(whole, list) and whole:
        return [message for message in whole if isinstance(message, dict)]
    found = list[Mapping[str, Any]]()
    for step in steps:
        trace = step.get("trace") or {}
        logged = (step.get("logs") or {}).get("_conversation")
        prompt = _conversation(trace.get("prompt")) if not found else []
        found += [*prompt, *_conversation(trace.get("policy_response")), *_conversation(logged)]
    return found


def _conversation(data: Any) -> list[Mapping[str, Any]]:
    messages = data.get("messages") if isinstance(data, dict) else data
    return [message for message in messages if isinstance(message, dict)] if isinstance(messages, list) else []


def _prompt_id(prompt: Sequence[Mapping[str, Any]]) -> str:
    return str(prompt[-1].get("content")) if prompt else ""
