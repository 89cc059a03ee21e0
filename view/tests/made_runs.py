"""Runs for the tests, without a trainer: samples by hand, and a run directory as rlcore writes it."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rlcore_view import Run, Sample, Tokens
from safetensors.numpy import save_file


def sample(step: int = 1, prompt: int = 0, number: int = 0, score: float | None = 0.0, /, **more: Any) -> Sample:
    """A sample of a prompt; `more` are further fields."""
    fields: dict[str, Any] = {
        "prompt": [{"role": "user", "content": f"question {prompt}"}],
        "completion": f"answer {number}",
        "num_sampled": 4,
        "truncated": False,
        "advantage": 0.5 - number,
        **more,
    }
    return Sample(step=step, prompt_id=f"all/{prompt}", sample=number, score=score, **fields)


def run_of(samples: Sequence[Sample], **metrics: Sequence[float]) -> Run:
    """A run of these samples; each metric has a value per step, from step 1."""
    steps = max([len(values) for values in metrics.values()], default=0)
    records = [
        {
            "step": step + 1,
            **{name.replace("__", "/"): values[step] for name, values in metrics.items() if step < len(values)},
        }
        for step in range(steps)
    ]
    return Run("made", "test", samples, records)


def spoken(text: str = "42", **arrays: Sequence[float]) -> Tokens:
    """A token per letter."""
    return Tokens(list(text), {name: list(values) for name, values in arrays.items()})


def write_rlcore_run(
    directory: Path, steps: int = 2, groups: int = 2, size: int = 2, text: str | Callable[[], str] = "4é!"
) -> Path:
    """A run directory with tokens of every training sample: the bytes of a text, then a digit."""
    made = text if callable(text) else lambda: text
    (directory / "trajectories").mkdir(parents=True)
    (directory / "tokens").mkdir()
    (directory / "config.yaml").write_text("actor:\n  lr: 1.0e-05\n")
    (directory / "plan.json").write_text('{"workers": []}')
    lines = list[str]()
    for step in range(1, steps + 1):
        rows = [_row(step, group, number, made()) for group in range(groups) for number in range(size)]
        file = directory / "trajectories" / f"step_{step:06d}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        _write_tokens(directory / "tokens", step, rows)
        lines.append(json.dumps({"step": step, "reward/mean": 0.5, "policy/entropy": None}) + "\n")
    (directory / "metrics.jsonl").write_text("".join(lines))
    letters = [
        {"id": byte, "bytes": f"{byte:02x}"} if byte > 127 else {"id": byte, "text": chr(byte)} for byte in range(256)
    ]
    (directory / "tokens" / "vocabulary.jsonl").write_text("".join(json.dumps(letter) + "\n" for letter in letters))
    return directory


def _row(step: int, group: int, number: int, text: str) -> dict[str, Any]:
    return {
        "id": {"prompt": f"sums/{group}", "epoch": step - 1, "sample": number, "segment": 0},
        "lane": "train",
        "source": "sums",
        "prompt": [{"role": "user", "content": f"{group}+{number}="}],
        "answer": str(group + number),
        "completion": f"{text}{number}",
        "num_tokens": 10,
        "num_sampled": len(text.encode()) + 1,
        "finish": "length" if number else "stop",
        "versions": [[6, step - 1]],
        "turns": 1,
        "agent": {},
        "status": "ok",
        "score": float(number),
        "components": {"right": float(number), "short": 1.0},
        "info": {"answer": str(number)},
        "advantage": number - 0.5,
    }


def _write_tokens(directory: Path, step: int, rows: Sequence[dict[str, Any]]) -> None:
    ids = [list(row["completion"].encode()) for row in rows]
    count = sum(map(len, ids))
    about = {
        "schema": 1,
        "record": "sampled",
        "step": step,
        "lane": "train",
        "rows": [list(row["id"].values()) for row in rows],
    }
    arrays = {
        "row_start": np.cumsum([0, *map(len, ids)], dtype=np.int64),
        "token_id": np.array([id_ for row in ids for id_ in row], dtype=np.int32),
        "position": np.array([6 + at + (at > 1) for row in ids for at in range(len(row))], dtype=np.int32),
        "logprob": -np.random.default_rng(step).exponential(size=count).astype(np.float32),
        "advantage": np.repeat([row["advantage"] for row in rows], [len(row) for row in ids]).astype(np.float32),
    }
    arrays["advantage"][0] = np.nan
    save_file(arrays, directory / f"step_{step:06d}.train.safetensors", {"rlcore-tokens": json.dumps(about)})
