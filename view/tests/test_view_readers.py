"""Readers: each trainer's files, what is torn, and what is foreign."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from made_runs import write_rlcore_run
from rlcore_view import ViewError, file_memory, read

HERE = Path(__file__).parent


def test_a_run_of_rlcore_has_its_samples_metrics_configuration_and_plan(tmp_path: Path) -> None:
    run = read(write_rlcore_run(tmp_path / "sums"))
    assert (run.name, run.format, len(run.samples)) == ("sums", "rlcore", 8)
    sample = run.samples[1]
    assert (sample.step, sample.prompt_id, sample.sample, sample.score, sample.advantage) == (1, "sums/0", 1, 1.0, 0.5)
    assert sample.truncated
    assert sample.components == {"right": 1.0, "short": 1.0}
    assert sample.info["reward"] == {"answer": "1"}
    assert run.curve("reward/mean") == [(1, 0.5), (2, 0.5)]
    assert run.curve("policy/entropy") == []
    assert "lr: 1.0e-05" in run.config
    assert run.plan == {"workers": []}
    assert [len(group) for group in run.groups()] == [2] * 4


def test_tokens_of_rlcore_spell_the_response_with_their_numbers_and_turns(tmp_path: Path) -> None:
    sample = read(write_rlcore_run(tmp_path / "sums")).samples[1]
    assert sample.tokens is not None
    assert list(sample.tokens.pieces) == ["4", "", "é", "!", "1"]
    assert list(sample.tokens.arrays["advantage"]) == [0.5] * 5
    assert list(sample.tokens.turn) == [0, 0, 1, 1, 1]
    first = read(tmp_path / "sums").samples[0].tokens
    assert first is not None
    assert math.isnan(first.arrays["advantage"][0] or 0.0)


def test_withheld_tokens_are_shown_as_such(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    path = write_rlcore_run(tmp_path / "sums", steps=1) / "tokens" / "step_000001.train.safetensors"
    arrays = load_file(path)
    arrays["token_id"] = arrays["token_id"].copy()
    arrays["token_id"][:5] = -1
    about = {"schema": 1, "rows": [[f"sums/{g}", 0, n, 0] for g in range(2) for n in range(2)]}
    save_file(arrays, path, {"rlcore-tokens": json.dumps(about)})
    tokens = read(tmp_path / "sums").samples[0].tokens
    assert tokens is not None
    assert list(tokens.pieces) == ["█"] * 5


@pytest.mark.parametrize("damage", ["a schema from the future", "a torn file", "another file"])
def test_tokens_that_cannot_be_read_are_a_note_and_the_rest_is_shown(tmp_path: Path, damage: str) -> None:
    path = write_rlcore_run(tmp_path / "sums", steps=1) / "tokens" / "step_000001.train.safetensors"
    data = path.read_bytes()
    path.write_bytes(
        {
            "a schema from the future": data.replace(b'\\"schema\\": 1', b'\\"schema\\": 2'),
            "a torn file": data[: len(data) // 2],
            "another file": b"PK\x03\x04 no header",
        }[damage]
    )
    run = read(tmp_path / "sums")
    assert len(run.samples) == 4
    assert run.samples[0].tokens is None
    [note] = run.notes
    assert "step_000001.train.safetensors" in note
    assert ("its schema is 2; this rlcore-view reads 1" in note) is (damage == "a schema from the future")


def test_tokens_that_exceed_memory_are_a_note(tmp_path: Path) -> None:
    path = write_rlcore_run(tmp_path / "sums", steps=1) / "tokens" / "step_000001.train.safetensors"
    os.truncate(path, 1 << 40)  # sparse: it takes no room on the disk
    [note] = read(tmp_path / "sums").notes
    assert "it has 1048576 MiB; files of up to 1024 MiB are shown" in note


def test_a_live_run_is_shown_up_to_its_last_whole_line(tmp_path: Path) -> None:
    run = write_rlcore_run(tmp_path / "sums", steps=1)
    file = run / "trajectories" / "step_000001.jsonl"
    file.write_text(file.read_text() + '{"id": {"prompt": "sums/9"')
    (run / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n{"step": 2, "rew')
    (run / "plan.json").write_text('{"work')
    found = read(run)
    assert len(found.samples) == 4
    assert found.curve("reward/mean") == [(1, 0.5)]
    assert found.notes == ["'plan.json' is not whole, so the plan is not shown"]


def test_a_line_that_is_damaged_in_the_middle_is_named(tmp_path: Path) -> None:
    run = write_rlcore_run(tmp_path / "sums", steps=1)
    (run / "metrics.jsonl").write_text('{"step": 1}\n[1, 2\n{"step": 2}\n')
    with pytest.raises(ViewError, match=r"metrics\.jsonl', line 2: b'\[1, 2\\n' is not a JSON object; fix or remove"):
        read(run)


def test_files_that_trl_wrote() -> None:
    run = read(HERE / "written_by_trl")
    assert run.format == "TRL completions"
    assert {sample.step for sample in run.samples} == {1, 2}
    assert [len(group) for group in run.groups()] == [2] * (len(run.samples) // 2)
    first = run.samples[0]
    assert first.components.keys() == {"length", "vowels"}
    assert first.score == pytest.approx(sum(first.components.values()))
    assert first.advantage is not None
    assert first.prompt[0]["content"].startswith("say ")
    assert "TRL does not record weights" in run.notes[0]
    assert read(HERE / "written_by_trl" / "completions_00002.parquet").samples[0].step == 2


@pytest.mark.parametrize(
    "broken",
    [
        lambda whole: whole[:-9],
        lambda whole: b"",
        lambda whole: whole[:4] + b"\xff" * 40 + whole[44:],
        lambda whole: whole.replace(b"say ", b"\xff\xfe\xfd ", 1),
    ],
    ids=["torn", "empty", "bad page", "not UTF-8"],
)
def test_a_parquet_file_that_is_not_whole_is_named(tmp_path: Path, broken: Callable[[bytes], bytes]) -> None:
    name = "completions_00001.parquet"
    (tmp_path / name).write_bytes(broken((HERE / "written_by_trl" / name).read_bytes()))
    with pytest.raises(ViewError, match=rf"{name}': this is not a whole parquet file: "):
        read(tmp_path)


def test_files_that_verl_wrote() -> None:
    run = read(HERE / "written_by_verl")
    assert run.format == "verl rollout_data_dir"
    assert [sample.score for sample in run.samples if sample.step == 2] == [1.0, 0.0, 1.0, 0.5]
    assert [len(group) for group in run.groups()] == [2] * 4
    assert run.samples[3].components == {"acc": 0.0}
    assert run.samples[3].info == {"format": "text"}
    assert run.samples[3].answer == "8"


def test_plain_conversations(tmp_path: Path) -> None:
    messages = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2"},
        {"role": "tool", "content": "x"},
    ]
    lines = [{"messages": messages, "reward": reward, "step": 3, "note": "n"} for reward in (1, 0.5)]
    (tmp_path / "talk.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = read(tmp_path / "talk.jsonl")
    assert [(sample.step, sample.sample, sample.score, sample.text()) for sample in run.samples] == [
        (3, 0, 1.0, "2"),
        (3, 1, 0.5, "2"),
    ]
    assert run.samples[0].prompt == messages[:1]
    assert run.samples[0].info == {"note": "n"}


def test_rewards_that_are_true_or_false_are_one_or_nought(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    talk = [{"messages": messages, "reward": reward} for reward in (True, False)]
    (tmp_path / "talk.jsonl").write_text("".join(json.dumps(line) + "\n" for line in talk))
    assert [sample.score for sample in read(tmp_path / "talk.jsonl").samples] == [1.0, 0.0]
    lines = [{"input": "p", "output": "o", "score": right, "acc": right, "step": 1} for right in (True, False)]
    (tmp_path / "verl").mkdir()
    (tmp_path / "verl" / "1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    samples = read(tmp_path / "verl").samples
    assert [(sample.score, sample.components) for sample in samples] == [(1.0, {"acc": 1.0}), (0.0, {"acc": 0.0})]


@pytest.mark.parametrize("content", [None, "", "hello\n", '{"a": 1}\n', "[1]\n", '{"messages": 3}\n'])
def test_what_is_not_a_run_is_refused_with_what_would_be(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "odd.jsonl"
    if content is None:
        path = tmp_path
    else:
        path.write_text(content)
    with pytest.raises(ViewError, match="this is not a run that rlcore-view knows; needs an rlcore run directory"):
        read(path)


def test_a_path_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ViewError, match="there is no such file or directory"):
        read(tmp_path / "nowhere")


def test_a_file_deep_as_a_well_is_refused(tmp_path: Path) -> None:
    (tmp_path / "deep.jsonl").write_text('{"messages": ' + "[" * 100_000 + "\n")
    with pytest.raises(ViewError, match="this is not a run"):
        read(tmp_path / "deep.jsonl")


@pytest.mark.parametrize(
    "name", ["config.yaml", "plan.json", "metrics.jsonl", "trajectories/step_000001.jsonl", "log.txt"]
)
@pytest.mark.parametrize("what", ["pipe", "directory"])
def test_what_stands_where_a_file_should_is_one_error(what: str, name: str, tmp_path: Path) -> None:
    """A pipe would be read until another program wrote to it."""
    path = write_rlcore_run(tmp_path / "run") / name
    path.unlink(missing_ok=True)
    os.mkfifo(path) if what == "pipe" else path.mkdir()
    with pytest.raises(ViewError, match=f"{name}': it (is not a file|cannot be read)"):
        read(tmp_path / "run")


def test_a_line_without_an_end_is_not_taken_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_memory, "MAX_BYTES", 1 << 16)
    run = write_rlcore_run(tmp_path / "run")
    os.truncate(run / "metrics.jsonl", 1 << 40)
    with pytest.raises(ViewError, match=r"metrics.jsonl': a line has "):
        read(run)
    (run / "metrics.jsonl").unlink()
    (run / "config.yaml").touch()
    os.truncate(run / "config.yaml", 1 << 40)
    with pytest.raises(ViewError, match=r"config.yaml': it has "):
        read(run)
