"""tokens/: what was sampled, with log-probs and advantages, as files that open without running anything."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from rlcore.data.batch import collate
from rlcore.data.tokenizer import ByteTokens
from rlcore.errors import CheckpointError, redaction
from rlcore.report.token_log import StepTokens, TokenLog
from rlcore.testing.rewards import make_trajectory
from rlcore.types import Batch, Lane, Reward, ScoredTrajectory, Trajectory, TrajectoryId

BYTES = ByteTokens()


def rows_of(*texts: str) -> list[Trajectory]:
    return [make_trajectory(sample=sample, text=text) for sample, text in enumerate(texts)]


def batch_of(rows: list[Trajectory], **arrays: Any) -> tuple[list[TrajectoryId], Batch]:
    batch = collate([[ScoredTrajectory(row, Reward(1.0)) for row in rows]], BYTES.pad_id)
    return [row.id for row in rows], replace(batch, **arrays)


def written(run_dir: Path, record: Any, found: StepTokens, lane: Lane = Lane.TRAIN) -> dict[str, Any]:
    log = TokenLog(run_dir, record, BYTES)
    log.learn(found.rows)
    log.write(3, lane, found)
    return load_file(run_dir / "tokens" / f"step_000003.{lane}.safetensors")


def test_sampled_keeps_the_sampled_tokens_of_each_row_with_their_positions(tmp_path: Path) -> None:
    rows = rows_of("four", "", "4!")
    arrays = written(tmp_path, "sampled", StepTokens(rows), Lane.EVAL)
    start = rows[0].prompt_length
    assert arrays["row_start"].tolist() == [0, 4, 4, 6]
    assert bytes(arrays["token_id"].tolist()) == b"four4!"
    assert arrays["position"].tolist() == [*range(start, start + 4), start, start + 1]
    assert arrays["logprob"].tolist() == [-1.0] * 6
    assert arrays.keys() == {"row_start", "token_id", "position", "logprob"}


def test_a_step_that_trained_on_nothing_has_advantages_that_are_not_numbers(tmp_path: Path) -> None:
    arrays = written(tmp_path, "sampled", StepTokens(rows_of("four", "4!")))
    assert arrays.keys() == {"row_start", "token_id", "position", "logprob", "advantage"}
    assert np.isnan(arrays["advantage"]).tolist() == [True] * 6


def test_all_keeps_every_token_and_says_which_were_sampled(tmp_path: Path) -> None:
    rows = rows_of("four", "4!")
    arrays = written(tmp_path, "all", StepTokens(rows))
    assert arrays["row_start"].tolist() == [0, len(rows[0].token_ids), sum(len(row.token_ids) for row in rows)]
    assert arrays["token_id"].tolist() == [id_ for row in rows for id_ in row.token_ids.tolist()]
    assert arrays["sampled"].astype(bool).tolist() == [bit for row in rows for bit in row.loss_mask.tolist()]


def test_none_writes_nothing(tmp_path: Path) -> None:
    log = TokenLog(tmp_path, "none", BYTES)
    log.learn(rows_of("four"))
    log.write(3, Lane.TRAIN, StepTokens(rows_of("four")))
    assert list(tmp_path.iterdir()) == []


def test_the_header_says_format_schema_step_lane_and_the_rows_ids(tmp_path: Path) -> None:
    written(tmp_path, "sampled", StepTokens(rows_of("a", "b")), Lane.EVAL)
    with safe_open(tmp_path / "tokens" / "step_000003.eval.safetensors", "numpy") as file:
        header = file.metadata()
    about = json.loads(header["rlcore-tokens"])
    ids = [[row.id.prompt, 0, row.id.sample, 0] for row in rows_of("a", "b")]
    assert about == {"schema": 1, "record": "sampled", "step": 3, "lane": "eval", "rows": ids}
    assert len(header) == 1


def test_an_advantage_per_row_applies_to_each_of_its_sampled_tokens(tmp_path: Path) -> None:
    rows = rows_of("ab", "c")
    batch = batch_of(rows, advantages_B=np.array([0.5, -1.5], dtype=np.float32))
    found = StepTokens(rows, [batch])
    assert written(tmp_path, "sampled", found)["advantage"].tolist() == [0.5, 0.5, -1.5]
    whole = written(tmp_path, "all", found)
    assert whole["advantage"][whole["sampled"] == 0].tolist() == [0.0] * 2 * rows[0].prompt_length


def test_an_advantage_per_token_stands_at_its_token_and_untrained_rows_have_none(tmp_path: Path) -> None:
    rows = rows_of("ab", "c", "dropped")
    ids, batch = batch_of(rows[:2])
    advantages_BT = np.arange(batch.tokens.token_ids_BT.size, dtype=np.float32).reshape(batch.tokens.token_ids_BT.shape)
    _, batch = batch_of(rows[:2], advantages_BT=advantages_BT)
    arrays = written(tmp_path, "sampled", StepTokens(rows, [(ids, batch)]))
    begin = rows[0].prompt_length
    assert arrays["advantage"][:3].tolist() == [*advantages_BT[0, begin : begin + 2], advantages_BT[1, begin]]
    assert np.isnan(arrays["advantage"][3:]).all()
    assert len(arrays["advantage"]) == 3 + len("dropped")


def test_the_log_probs_of_a_pass_are_kept_and_those_of_the_sampler_are_not_repeated(tmp_path: Path) -> None:
    rows = rows_of("ab")
    ids, batch = batch_of(rows)
    sampler_BT = batch.tokens.rollout_logprobs_BT
    sampled = StepTokens(rows, [(ids, replace(batch, old_logprobs_BT=sampler_BT))])
    assert "old_logprob" not in written(tmp_path, "sampled", sampled)
    passed = StepTokens(rows, [(ids, replace(batch, old_logprobs_BT=sampler_BT - 0.25))])
    arrays = written(tmp_path, "sampled", passed)
    assert arrays["old_logprob"].tolist() == [-1.25, -1.25]


def test_the_ids_of_a_row_whose_text_holds_a_secret_are_withheld(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redaction, "_resolved", {})
    monkeypatch.setattr(redaction, "_in_json", {})
    monkeypatch.setenv("RLCORE_TEST_TOKEN", "s3cret-s3cret")
    redaction.remember_variable("RLCORE_TEST_TOKEN")
    rows = rows_of("it is s3cret-s3cret", "four")
    arrays = written(tmp_path, "sampled", StepTokens(rows))
    length = len("it is s3cret-s3cret")
    assert arrays["token_id"][:length].tolist() == [-1] * length
    assert bytes(arrays["token_id"][length:].tolist()) == b"four"
    assert arrays["logprob"].tolist() == [-1.0] * (length + 4)
    letters = {json.loads(line)["text"] for line in (tmp_path / "tokens" / "vocabulary.jsonl").read_text().splitlines()}
    assert letters == set("four")


def test_each_token_is_in_the_vocabulary_once_also_after_a_crash_tore_its_last_line(tmp_path: Path) -> None:
    written(tmp_path, "sampled", StepTokens(rows_of("é4")))
    path = tmp_path / "tokens" / "vocabulary.jsonl"
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    assert entries == [{"id": ord("4"), "text": "4"}, {"id": 0xA9, "bytes": "a9"}, {"id": 0xC3, "bytes": "c3"}]
    path.write_bytes(path.read_bytes() + b'{"id": 5')
    written(tmp_path, "sampled", StepTokens(rows_of("45")))
    assert [json.loads(line) for line in path.read_text().splitlines()] == [*entries, {"id": ord("5"), "text": "5"}]


@pytest.mark.parametrize("line", [b"junk", b"\xff", b"[1]", b'{"id": 1e400}', b'{"id": "4"}', b"{}", b"[" * 100_000])
def test_a_vocabulary_with_anything_in_it_is_named_in_one_line(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "vocabulary.jsonl").write_bytes(line + b"\n")
    with pytest.raises(CheckpointError, match=r"vocabulary\.jsonl': .* is not an entry of a vocabulary"):
        written(tmp_path, "sampled", StepTokens(rows_of("4")))


def test_cutting_back_removes_the_files_of_later_steps(tmp_path: Path) -> None:
    log = TokenLog(tmp_path, "sampled", BYTES)
    rows = rows_of("a")
    log.learn(rows)
    for step in (1, 2, 3):
        log.write(step, Lane.TRAIN, StepTokens(rows))
        log.write(step, Lane.EVAL, StepTokens(rows))
    log.cut_back(2)
    assert sorted(path.name for path in (tmp_path / "tokens").glob("*.safetensors")) == [
        f"step_00000{step}.{lane}.safetensors" for step in (1, 2) for lane in ("eval", "train")
    ]
    log.cut_back(1, evaluated=False)
    assert [path.name for path in (tmp_path / "tokens").glob("*.safetensors")] == ["step_000001.train.safetensors"]


def test_a_directory_that_cannot_be_written_ends_the_run_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"step_000003\.train\.safetensors': records cannot be written"):
        written(tmp_path, "sampled", StepTokens(rows_of("a")))


def test_a_file_that_cannot_be_removed_ends_a_resume_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "tokens" / "step_000005.train.safetensors").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"step_000005\.train\.safetensors': records cannot be written"):
        TokenLog(tmp_path, "all", BYTES).cut_back(3)
