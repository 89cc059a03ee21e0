"""Writes a run's tokens to disk: `tokens/step_000012.train.safetensors`, and `tokens/vocabulary.jsonl`.

docs/run-directory.md describes both. The files hold numbers and texts of single tokens, so opening them runs no code.
"""

import json
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from rlcore.contracts.tokens import Tokens
from rlcore.errors import CheckpointError
from rlcore.errors.redaction import has_secrets, redact
from rlcore.report.files import write_atomically
from rlcore.report.metrics import writing_records
from rlcore.types import Batch, Int32s, Lane, Trajectory, TrajectoryId

TOKENS, VOCABULARY = "tokens", "vocabulary.jsonl"
FORMAT, SCHEMA = "rlcore-tokens", 1
WITHHELD = -1
"""Replaces each token id of a row whose text holds a secret."""

RecordTokens = Literal["all", "sampled", "none"]

_STEP_FILE = re.compile(r"step_(\d+)\.(train|eval)\.safetensors")
_FROM_BATCH = {
    "old_logprob": "old_logprobs_BT",
    "reference_logprob": "reference_logprobs_BT",
    "value": "values_BT",
    "entropy": "entropy_BT",
}
"""Fields of a batch by the name of their array in the file; a field is written if a pass computed it."""


@dataclass(frozen=True, eq=False)
class StepTokens:
    """The rows of a step, or of an evaluation, and the batches that were trained on."""

    rows: Sequence[Trajectory]
    batches: Sequence[tuple[Sequence[TrajectoryId], Batch]] = ()
    """Ids of a batch's rows, with the batch after its advantages are known."""


class TokenLog:
    """Writes a safetensors file per step and lane; a file is replaced as a whole."""

    def __init__(self, run_dir: Path, record: RecordTokens, tokens: Tokens) -> None:
        self._directory, self._record, self._tokens = run_dir / TOKENS, record, tokens
        self._pieces: dict[int, bytes] = {}
        self._seen = np.zeros(0, dtype=np.bool_)
        """True for each token id whose piece is known."""
        self._written: set[int] = set()
        """Ids that the vocabulary on disk has."""
        self._repaired = False

    def learn(self, rows: Sequence[Trajectory]) -> None:
        """Look up the texts of tokens not seen before. Call it from the thread that uses the tokenizer."""
        if self._record == "none" or not rows:
            return
        ids = np.concatenate([row.token_ids for row in rows])
        if (missing := int(ids.max(initial=-1)) + 1 - len(self._seen)) > 0:
            self._seen = np.pad(self._seen, (0, missing))
        for id_ in np.unique(ids[~self._seen[ids]]).tolist():
            self._pieces[id_] = self._tokens.piece(id_)
            self._seen[id_] = True

    def write(self, step: int, lane: Lane, found: StepTokens) -> None:
        """Write the file of a step whose rows `learn` has seen; write nothing if tokens are not recorded."""
        if self._record == "none" or not found.rows:
            return
        from safetensors.numpy import save

        arrays = self._arrays(found, lane)
        ids = [[row.id.prompt, row.id.epoch, row.id.sample, row.id.segment] for row in found.rows]
        about = {"schema": SCHEMA, "record": self._record, "step": step, "lane": str(lane), "rows": ids}
        header = {FORMAT: redact(json.dumps(about))}  # one entry, because the order of several differs between runs
        path = self._directory / f"step_{step:06d}.{lane}.safetensors"
        with writing_records(path):
            self._directory.mkdir(exist_ok=True)
            self._write_vocabulary(arrays["token_id"])
            write_atomically(path, save(arrays, header))

    def cut_back(self, step: int, evaluated: bool = True) -> None:
        """Remove the files of later steps, the latest first, and unless it was `evaluated` this one's evaluation."""
        for path in sorted(self._directory.glob("step_*.safetensors"), reverse=True):
            named = _STEP_FILE.fullmatch(path.name)
            if named and (int(named[1]) > step or (int(named[1]) == step and named[2] == Lane.EVAL and not evaluated)):
                with writing_records(path):
                    path.unlink()

    def _arrays(self, found: StepTokens, lane: Lane) -> dict[str, npt.NDArray[Any]]:
        """The arrays of the file by name: the recorded tokens of the rows, one row after the other."""
        whole = self._record == "all"
        kept = [np.arange(len(row.token_ids)) if whole else np.flatnonzero(row.loss_mask) for row in found.rows]
        ids = [self._shown_ids(row)[at] for row, at in zip(found.rows, kept, strict=True)]
        lengths = [len(positions) for positions in kept]
        arrays: dict[str, npt.NDArray[Any]] = {
            "row_start": np.cumsum([0, *lengths], dtype=np.int64),
            "token_id": np.concatenate(ids),
            "logprob": np.concatenate([row.logprobs[at] for row, at in zip(found.rows, kept, strict=True)]),
        }
        if whole:
            arrays["sampled"] = np.concatenate([row.loss_mask for row in found.rows]).astype(np.uint8)
        else:
            arrays["position"] = np.concatenate(kept).astype(np.int32)
        return arrays | (_of_batches(found, kept, arrays["row_start"]) if lane is Lane.TRAIN else {})

    def _shown_ids(self, row: Trajectory) -> Int32s:
        if has_secrets():
            text = b"".join(map(self._pieces.__getitem__, row.token_ids.tolist())).decode(errors="replace")
            if redact(text) != text:
                return np.full_like(row.token_ids, WITHHELD)
        return row.token_ids

    def _write_vocabulary(self, ids: Int32s) -> None:
        path = self._directory / VOCABULARY
        if not self._repaired:
            self._written = set(_vocabulary_ids(path))
            self._repaired = True
        new = [id_ for id_ in np.unique(ids).tolist() if id_ != WITHHELD and id_ not in self._written]
        if new:
            lines = [json.dumps({"id": id_, **_entry(self._pieces[id_])}, ensure_ascii=False) + "\n" for id_ in new]
            with path.open("a", encoding="utf-8") as file:
                file.writelines(lines)
            self._written.update(new)


def _of_batches(
    found: StepTokens, kept: Sequence[npt.NDArray[Any]], row_start: npt.NDArray[np.int64]
) -> dict[str, npt.NDArray[np.float32]]:
    """Advantages and the arrays of passes, per token; NaN in rows that were not trained on."""
    where = {id_: (batch, index) for ids, batch in found.batches for index, id_ in enumerate(ids)}
    names = {name: field for name, field in _FROM_BATCH.items() if _has(found.batches, field)}
    arrays = {name: np.full(int(row_start[-1]), np.nan, dtype=np.float32) for name in ("advantage", *names)}
    for number, row in enumerate(found.rows):
        if row.id not in where:
            continue
        batch, index = where[row.id]
        span, positions = slice(int(row_start[number]), int(row_start[number + 1])), kept[number]
        if batch.advantages_BT is not None:
            arrays["advantage"][span] = batch.advantages_BT[index, positions]
        elif batch.advantages_B is not None:
            arrays["advantage"][span] = np.where(row.loss_mask[positions], batch.advantages_B[index], 0)
        for name, field in names.items():
            arrays[name][span] = getattr(batch, field)[index, positions]
    return arrays


def _has(batches: Iterable[tuple[Sequence[TrajectoryId], Batch]], field: str) -> bool:
    """True if a pass computed the array; numbers that the sampler recorded are not written twice."""
    values = [(getattr(batch, field), batch.tokens.rollout_logprobs_BT) for _, batch in batches]
    return bool(values) and all(value is not None and value is not sampler for value, sampler in values)


def _entry(piece: bytes) -> Mapping[str, str]:
    """The token's entry in the vocabulary: its text, or its bytes in hexadecimal if they are not whole characters."""
    try:
        return {"text": redact(piece.decode())}
    except UnicodeDecodeError:
        return {"bytes": piece.hex()}


def _vocabulary_ids(path: Path) -> Iterator[int]:
    """The ids in the file; removes an incomplete last line from it."""
    if not path.exists():
        return
    lines = [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    with path.open("r+b") as file:
        file.truncate(sum(map(len, lines)))
    for line in lines:
        try:
            yield operator.index(json.loads(line)["id"])
        except (ValueError, KeyError, TypeError, RecursionError) as cause:
            raise CheckpointError(
                f"'{path}': {line[:60]!r} is not an entry of a vocabulary; fix or remove the file"
            ) from cause
