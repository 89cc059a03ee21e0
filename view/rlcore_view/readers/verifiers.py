"""Reads rollouts of verifiers and prime-rl.

`traces.jsonl` has one trace per line, or an episode with its `traces`; a trace is a graph of messages. prime-rl writes
one below `step_<n>/train` and `step_<n>/eval`. Older versions of both wrote a flat line per rollout: `results.jsonl`,
`train_rollouts.jsonl`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rlcore_view.json_lines import first_record, made_of, number_or_none, score_or_none
from rlcore_view.model import Event, Run, Sample, Tokens

_STEP = re.compile(r"step_(\d+)")
_EVAL = re.compile(r"(?:^|[^a-z])eval")
_NAMES = ("traces.jsonl", "results.jsonl", "train_rollouts.jsonl", "eval_rollouts*.jsonl")
_LIMITS = ("max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens")
_SPANS = {"boot": "setup", "setup": "setup", "scoring": "reward", "finalize": "finalize"}
_ARRAYS = {
    "logprobs": "logprob",
    "advantages": "advantage",
    "trainer_logprobs": "old_logprob",
    "reference_logprobs": "reference_logprob",
    "entropies": "entropy",
}

Found = tuple[Sample, list[Event]]


def recognises(path: Path) -> bool:
    """True for a file of traces or results, or a directory with some, such as prime-rl's output directory."""
    return any(first is not None and _fits(first) for first in map(first_record, _files(path)[:1]))


def read(path: Path) -> Run:
    """Every rollout, shown by the last branch of its conversation; for prime-rl, those that were trained on."""
    seen: dict[tuple[int, str, str], int] = {}
    samples, events = list[Sample](), list[Event]()
    files = _files(path)
    for file in files:
        for found in made_of(file, partial(_rollouts, file=file, seen=seen)):
            for sample, spans in found:
                samples.append(sample)
                events += spans
    notes = (
        ["rollouts that were not trained on are in all/traces.jsonl and are not shown"]
        if any(file.parent.name == "effective" for file in files)
        else []
    )
    if any(sample.tokens is not None for sample in samples):
        notes.append("traces hold ids of tokens and not their texts, so tokens are shown by their ids")
    name = "prime-rl rollouts" if any(_STEP.search(str(file)) for file in files) else "verifiers traces"
    return Run(name=path.resolve().name, format=name, samples=samples, events=events, notes=notes)


def _fits(record: Mapping[str, Any]) -> bool:
    inner = record.get("traces")
    if isinstance(inner, list):
        return not inner or (isinstance(inner[0], dict) and "nodes" in inner[0])
    flat = {"prompt", "completion", "reward"} <= record.keys() and bool({"example_id", "task"} & record.keys())
    return "nodes" in record or flat


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path] if path.suffix == ".jsonl" else []
    below = [
        file for name in _NAMES for at in (name, f"step_*/**/{name}", f"*/step_*/**/{name}") for file in path.glob(at)
    ]
    chosen = {file.parent.parent for file in below if file.parent.name == "effective"}
    kept = {file for file in below if not (file.parent.name == "all" and file.parent.parent in chosen)}
    return sorted(kept, key=lambda file: (_step_of(file), str(file)))


def _step_of(file: Path) -> int:
    named = _STEP.findall(str(file))
    return int(named[-1]) if named else 0


def _rollouts(record: Mapping[str, Any], file: Path, seen: dict[tuple[int, str, str], int]) -> list[Found]:
    found = list[Found]()
    for trace in record["traces"] if isinstance(record.get("traces"), list) else [record]:
        context = {**record, **trace}
        step = int(number_or_none(context.get("eval_step")) or _step_of(file))
        is_eval = context.get("kind") == "eval" or "eval" in file.parts[-3:] or _EVAL.search(file.name)
        lane = "eval" if is_eval else "train"
        prompt = _prompt_id(context)
        number = seen[step, lane, prompt] = seen.get((step, lane, prompt), -1) + 1
        place = {"step": step, "lane": lane, "prompt_id": prompt, "sample": number}
        sample = _traced(context, place) if "nodes" in trace else _flat(context, place)
        found.append((sample, list(_spans(trace, sample))))
    return found


def _prompt_id(record: Mapping[str, Any]) -> str:
    task = record.get("task")
    data = task.get("data") if isinstance(task, dict) else None
    found = data.get("idx") if isinstance(data, dict) else record.get("example_id")
    environment = (
        record.get("env_name") or (record.get("env") or {}).get("id") or (task if isinstance(task, str) else "")
    )
    if found is None:
        found = (task.get("key") if isinstance(task, dict) else None) or str(record.get("prompt"))
    return f"{environment}/{found}" if environment else str(found)


def _flat(record: Mapping[str, Any], place: Mapping[str, Any]) -> Sample:
    prompt, completion = record["prompt"], record["completion"]
    known = {"prompt", "completion", "reward", "answer", "example_id", "advantage", "error", "metrics", "is_truncated"}
    numbers = {**(record.get("metrics") or {}), **{name: value for name, value in record.items() if name not in known}}
    components = {name: number for name, value in numbers.items() if (number := number_or_none(value)) is not None}
    return Sample(
        prompt=prompt if isinstance(prompt, list) else ({"role": "user", "content": str(prompt)},),
        completion=completion if isinstance(completion, list) else str(completion),
        score=score_or_none(record["reward"]),
        answer=record.get("answer"),
        components=components,
        advantage=number_or_none(record.get("advantage")),
        truncated=record["is_truncated"] if isinstance(record.get("is_truncated"), bool) else None,
        status="failed" if record.get("error") else "ok",
        info={name: record[name] for name in ("error", "info", "stop_condition", "timing") if record.get(name)},
        **place,
    )


def _traced(trace: Mapping[str, Any], place: Mapping[str, Any]) -> Sample:
    nodes = _last_branch(trace["nodes"])
    begin = next((at for at, node in enumerate(nodes) if node.get("sampled")), len(nodes))
    data = (trace.get("task") or {}).get("data") or {}
    rewards = {name: value for name, value in (trace.get("rewards") or {}).items() if value is not None}
    worth = {
        name: float(value["score"]) * float(value.get("weight", 1.0)) if isinstance(value, dict) else float(value)
        for name, value in rewards.items()
    }
    errors = trace.get("errors") or []
    calls = [call for call in trace.get("calls") or [] if not call.get("error")]
    return Sample(
        prompt=[node["message"] for node in nodes[:begin]]
        or ({"role": "user", "content": str(data.get("prompt", ""))},),
        completion=[node["message"] for node in nodes[begin:]],
        score=sum(worth.values()) if worth else number_or_none(trace.get("reward")),
        answer=data.get("answer"),
        components=worth,
        advantage=number_or_none(trace.get("advantage")),
        num_sampled=trace.get("num_output_tokens"),
        truncated=trace.get("stop_condition") in _LIMITS or bool(calls and calls[-1].get("finish_reason") == "length"),
        status="failed" if errors and not worth else "ok",
        info={
            "metrics": trace.get("metrics") or {},
            "stop_condition": trace.get("stop_condition"),
            "errors": [{name: error.get(name) for name in ("type", "message")} for error in errors],
            "policy_version": trace.get("policy_version"),
        },
        tokens=_tokens(nodes),
        **place,
    )


def _last_branch(nodes: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    found, at = list[Mapping[str, Any]](), len(nodes) - 1
    while 0 <= at < len(nodes) and len(found) <= len(nodes):
        found.append(nodes[at])
        parent = nodes[at].get("parent")
        at = -1 if parent is None else int(parent)
    return found[::-1]


def _tokens(nodes: Sequence[Mapping[str, Any]]) -> Tokens | None:
    """Token ids with their values; a node's values belong to its sampled tokens, in order."""
    ids = [id_ for node in nodes for id_ in node.get("token_ids") or ()]
    if not ids:
        return None
    sampled = [bool(value) for node in nodes for value in node.get("mask") or ()]
    spread = {ours: [value for node in nodes for value in _spread(node, theirs)] for theirs, ours in _ARRAYS.items()}
    arrays = {name: values for name, values in spread.items() if any(value is not None for value in values)}
    return Tokens([f" {id_}" for id_ in ids], arrays, sampled)


def _spread(node: Mapping[str, Any], name: str) -> list[float | None]:
    values = iter(node.get(name) or ())
    return [number_or_none(next(values, None)) if sampled else None for sampled in node.get("mask") or ()]


def _spans(trace: Mapping[str, Any], sample: Sample) -> Iterator[Event]:
    timing = trace.get("timing")
    calls = [("generate", "generate", call.get("time")) for call in trace.get("calls") or ()]
    spans = [(name, kind, timing.get(name)) for name, kind in _SPANS.items()] if isinstance(timing, dict) else []
    for name, kind, span in (*spans, *calls):
        start, end = (number_or_none((span or {}).get(side)) for side in ("start", "end"))
        if start and end and end > start:
            identity = (sample.prompt_id, sample.epoch, sample.sample, sample.segment)
            row = f"{sample.prompt_id} sample {sample.sample}"
            yield Event(name, kind, start, end - start, row, sample.step, identity, trace.get("policy_version"))
