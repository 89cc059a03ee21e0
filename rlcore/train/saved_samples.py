"""Scored trajectories on disk, so rewards that were not trained on yet survive the run.

Plain arrays and JSON, no pickle. Values that JSON lacks (in `info`, and in messages) come back as text, tuples
as lists.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rlcore.errors import CheckpointError, describe
from rlcore.types import (
    FinishReason,
    FrozenDict,
    Prompt,
    Reward,
    RewardStatus,
    ScoredTrajectory,
    Trajectory,
    TrajectoryId,
    frozen_messages,
    plain,
)

ROWS = "rows.json"
ARRAYS: Mapping[str, type[np.generic]] = {
    "token_ids": np.int32,
    "loss_mask": np.bool_,
    "logprobs": np.float32,
    "token_scores": np.float32,
}
"""Files of one array each, that of all rows one after another; rows without token scores have none in that file."""


def write_scored(directory: Path, rows: Sequence[ScoredTrajectory]) -> None:
    """Write the rows into a new directory; nothing when there are none."""
    if not rows:
        return
    directory.mkdir(parents=True)
    arrays: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in ARRAYS}
    for row in rows:
        for name in ("token_ids", "loss_mask", "logprobs"):
            arrays[name].append(getattr(row.trajectory, name))
        if row.reward.token_scores is not None:
            arrays["token_scores"].append(row.reward.token_scores)
    for name, dtype in ARRAYS.items():
        np.save(directory / f"{name}.npy", np.concatenate([np.zeros(0, dtype), *arrays[name]]).astype(dtype))
    text = json.dumps([_describe(row) for row in rows], allow_nan=False)
    (directory / ROWS).write_text(text, "utf-8", errors="backslashreplace")


def read_scored(directory: Path, prompt: Callable[[str], Prompt]) -> list[ScoredTrajectory]:
    """The samples that `write_scored` wrote, in order; `prompt` finds one by its id. CheckpointError if damaged."""
    if not directory.exists():
        return []
    try:
        arrays = {name: np.load(directory / f"{name}.npy", allow_pickle=False) for name in ARRAYS}
        described = json.loads((directory / ROWS).read_text("utf-8"))
        offset = scores_offset = 0
        rows = []
        for fact in described:
            end, scores_end = offset + fact["length"], scores_offset + fact["length"] * fact["has_token_scores"]
            tokens = {name: arrays[name][offset:end].copy() for name in ("token_ids", "loss_mask", "logprobs")}
            scores = arrays["token_scores"][scores_offset:scores_end].copy() if fact["has_token_scores"] else None
            rows.append(_restored(fact, tokens, scores, prompt))
            offset, scores_offset = end, scores_end
        return rows
    except (OSError, ValueError, KeyError, TypeError) as cause:
        raise CheckpointError(f"'{directory}': no scored trajectories can be read: {describe(cause)}") from cause


def _describe(row: ScoredTrajectory) -> dict[str, Any]:
    trajectory, reward = row.trajectory, row.reward
    text = trajectory.completion
    return {
        "id": asdict(trajectory.id),
        "length": len(trajectory.token_ids),
        "has_token_scores": reward.token_scores is not None,
        "completion": text if isinstance(text, str) else [_json(message) for message in text],
        "finish": trajectory.finish.value,
        "versions": [list(version) for version in trajectory.versions],
        "turns": trajectory.turns,
        "num_segments": trajectory.num_segments,
        "timing": _json(trajectory.timing),
        "trajectory_info": _json(trajectory.info),
        "opening": None if trajectory.opening is None else [_json(message) for message in trajectory.opening],
        "score": reward.score,
        "components": _json(reward.components),
        "status": reward.status.value,
        "latency_s": reward.latency_s,
        "reward_info": _json(reward.info),
    }


def _restored(
    record: Mapping[str, Any],
    tokens: Mapping[str, npt.NDArray[Any]],
    token_scores: npt.NDArray[np.float32] | None,
    prompt: Callable[[str], Prompt],
) -> ScoredTrajectory:
    text = record["completion"]
    trajectory = Trajectory(
        id=TrajectoryId(**record["id"]),
        prompt=prompt(record["id"]["prompt"]),
        token_ids=tokens["token_ids"],
        loss_mask=tokens["loss_mask"],
        logprobs=tokens["logprobs"],
        completion=text if isinstance(text, str) else frozen_messages(text),
        finish=FinishReason(record["finish"]),
        versions=tuple((int(start), int(version)) for start, version in record["versions"]),
        turns=record["turns"],
        num_segments=record["num_segments"],
        timing=FrozenDict(record["timing"]),
        info=FrozenDict(record["trajectory_info"]),
        opening=None if record.get("opening") is None else frozen_messages(record["opening"]),
    )
    reward = Reward(
        score=record["score"],
        components=FrozenDict({name: float(value) for name, value in record["components"].items()}),
        status=RewardStatus(record["status"]),
        token_scores=token_scores,
        latency_s=record["latency_s"],
        info=FrozenDict(record["reward_info"]),
    )
    return ScoredTrajectory(trajectory, reward)


def _json(value: Any) -> Any:
    """The value as JSON; values that JSON lacks become text."""
    return plain(value, _leaf, str)


def _leaf(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return value if isinstance(value, float) and math.isfinite(value) else str(value)
