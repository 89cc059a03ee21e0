"""Reads open-instruct's `--save_traces`: shards `<run>_rollouts_000000.jsonl`, a line per sample, without texts."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rlcore_view.json_lines import first_record, made_of, number_or_none, score_or_none
from rlcore_view.model import Run, Sample, Tokens

_FILE = "*_rollouts_*.jsonl"


def recognises(path: Path) -> bool:
    """True for a shard, or a directory of shards."""
    files = _files(path)
    first = first_record(files[0]) if files else None
    return first is not None and {"prompt_tokens", "response_tokens", "prompt_idx", "reward"} <= first.keys()


def read(path: Path) -> Run:
    """Every sample of every shard."""
    seen: dict[tuple[int, int], int] = {}
    samples = [sample for file in _files(path) for sample in made_of(file, partial(_sample, seen=seen))]
    note = "open-instruct records ids of tokens and not their texts, so tokens are shown by their ids"
    return Run(path.resolve().name, "open-instruct rollouts", samples, notes=[note])


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path] if path.suffix == ".jsonl" else []
    return sorted(path.glob(_FILE))


def _sample(record: Mapping[str, Any], seen: dict[tuple[int, int], int]) -> Sample:
    step, prompt = int(record["step"]), int(record["prompt_idx"])
    number = seen[step, prompt] = seen.get((step, prompt), -1) + 1
    ids, advantage = record["response_tokens"], number_or_none(record.get("advantage"))
    called = record.get("request_info")
    arrays = {"advantage": [advantage] * len(ids)}
    if record.get("logprobs"):
        arrays["logprob"] = [number_or_none(value) for value in record["logprobs"]]
    spelled = " ".join(map(str, record["prompt_tokens"]))
    return Sample(
        step=step,
        source=str(record.get("dataset", "")),
        prompt_id=f"{record.get('dataset', '')}: {spelled}",
        sample=number,
        prompt=({"role": "user", "content": f"token ids: {spelled}"},),
        completion=f"token ids: {' '.join(map(str, ids))}",
        score=score_or_none(record["reward"]),
        answer=record.get("ground_truth"),
        advantage=advantage,
        num_sampled=len(ids),
        truncated=record.get("finish_reason") == "length",
        info={"tools": called} if called else {},
        tokens=Tokens([f" {id_}" for id_ in ids], arrays),
    )
