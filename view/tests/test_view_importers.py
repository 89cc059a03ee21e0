"""Files of other tools.

Those of inspect and verifiers were written by running the tools, with a model that is made up. Those of
tinker-cookbook, open-instruct and prime-rl are made here after the source that writes them.
"""

import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
from rlcore_view import ViewError, read
from rlcore_view.readers import inspect_eval

HERE = Path(__file__).parent
EVAL = HERE / "written_by_inspect" / "sums.eval"
TRACES = HERE / "written_by_verifiers" / "traces.jsonl"


def write_lines(path: Path, *records: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_a_log_that_inspect_wrote() -> None:
    run = read(EVAL)
    assert (run.format, run.name) == ("inspect log", "task: mockllm/model")
    assert [(sample.prompt_id, sample.sample, sample.score) for sample in run.samples] == [
        ("one", 0, 1.0),
        ("two", 0, 1.0),
        ("one", 1, 0.0),
        ("two", 1, 0.0),
    ]
    first = run.samples[0]
    assert first.components == {"includes": 1.0, "match": 1.0}
    assert [message["role"] for message in first.completion] == ["assistant", "tool", "assistant"]  # type: ignore[index]
    assert first.completion[0]["tool_calls"] == [{"name": "add", "arguments": {"x": 0, "y": 1}}]  # type: ignore[index,call-overload]
    assert (first.text().splitlines()[-1], first.answer, first.num_sampled) == ("The answer is 1", "1", 37)
    assert [event.kind for event in run.events if event.sample == ("one", 0, 0, 0)] == ["generate", "tool", "generate"]
    assert len(list(run.groups())) == 2


def deflated_log(path: Path, sample: str, header: str = '{"status": "started", "eval": {"task": "t"}}') -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as log:
        log.writestr("header.json", header)
        log.writestr("samples/one_epoch_1.json", sample)
    return path


def test_a_log_without_zstandard_and_its_attachments(tmp_path: Path) -> None:
    sample = {
        "id": 7,
        "epoch": 1,
        "messages": [{"role": "user", "content": "attachment://abc"}],
        "attachments": {"abc": "long"},
        "scores": {"right": {"value": "P"}, "words": {"value": "blue"}},
        "error": {"message": "lost"},
    }
    run = read(deflated_log(tmp_path / "old.eval", json.dumps(sample)))
    assert run.samples[0].prompt == [{"role": "user", "content": "long"}]
    assert (run.samples[0].components, run.samples[0].status) == ({"right": 0.5}, "failed")
    assert run.notes == ["the log's status is started"]


@pytest.mark.parametrize("bomb", ["zstandard", "deflate"])
def test_a_log_that_unpacks_to_more_than_its_bound_is_refused(
    tmp_path: Path, bomb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspect_eval, "LARGEST_SAMPLE", 2000)
    path = EVAL if bomb == "zstandard" else deflated_log(tmp_path / "bomb.eval", " " * 1_000_000 + "{}")
    with pytest.raises(ViewError, match=r"is larger than 0 MiB, or the log than 2048 MiB"):
        read(path)


@pytest.mark.parametrize(
    ("sample", "problem"),
    [
        ('{"epoch": 1, "messages": []}', "its fields are not those of this format: KeyError: 'id'"),
        ('{"id": 1, "epoch": 1, "messages": [3]}', "AttributeError"),
        ("{", "samples/one_epoch_1.json is not JSON"),
    ],
)
def test_a_damaged_sample_of_a_log_is_named(tmp_path: Path, sample: str, problem: str) -> None:
    with pytest.raises(ViewError) as raised:
        read(deflated_log(tmp_path / "odd.eval", sample))
    assert problem in str(raised.value)


def test_a_torn_log_is_refused(tmp_path: Path) -> None:
    data = bytearray(EVAL.read_bytes())
    data[200:6000] = bytes(5800)
    (tmp_path / "torn.eval").write_bytes(data)
    with pytest.raises(ViewError, match=r"torn\.eval"):
        read(tmp_path / "torn.eval")
    (tmp_path / "torn.eval").write_bytes(data[:8000])
    with pytest.raises(ViewError, match="this is not a run"):
        read(tmp_path / "torn.eval")


def test_traces_that_verifiers_wrote() -> None:
    run = read(TRACES.parent)
    assert run.format == "verifiers traces"
    found = {(sample.prompt_id, sample.sample): sample for sample in run.samples}
    assert found.keys() == {("mysums/0", 0), ("mysums/0", 1), ("mysums/1", 0), ("mysums/1", 1)}
    assert sorted(sample.score or 0.0 for sample in run.samples) == [0.0, 0.0, 1.0, 1.0]
    first = run.samples[0]
    assert first.components == {"right": 0.0, "short": 0.0}
    assert first.prompt == [{"role": "user", "content": "1+1=?"}]
    assert (first.text(), first.answer, first.truncated, first.num_sampled) == ("The sum is unknown", "2", True, 5)
    assert {event.kind for event in run.events} == {"setup", "generate", "reward", "finalize"}


def trace(number: int, score: float, **more: Any) -> dict[str, Any]:
    nodes = [
        {"message": {"role": "user", "content": "hi"}, "token_ids": [1, 2], "mask": [False, False]},
        {"parent": 0, "message": {"role": "assistant", "content": "dead end"}, "sampled": True},
        {
            "parent": 0,
            "message": {"role": "assistant", "content": f"yes {number}"},
            "sampled": True,
            "token_ids": [3, 4, 5],
            "mask": [False, True, True],
            "logprobs": [-0.5, -1.5],
        },
    ]
    return {"nodes": nodes, "task": {"data": {"idx": 3}}, "rewards": {"r": {"score": score, "weight": 2.0}}, **more}


def test_rollouts_of_prime_rl(tmp_path: Path) -> None:
    steps = tmp_path / "rollouts" / "step_4"
    write_lines(
        steps / "train" / "effective" / "traces.jsonl", trace(0, 1.0, env_name="e"), trace(1, 0.0, env_name="e")
    )
    write_lines(steps / "train" / "all" / "traces.jsonl", *[trace(n, 1.0) for n in range(9)])
    write_lines(steps / "eval" / "all" / "traces.jsonl", trace(2, 1.0, kind="eval", eval_step=4))
    for path in (tmp_path, tmp_path / "rollouts"):
        run = read(path)
        assert run.format == "prime-rl rollouts"
        assert [(s.lane, s.step, s.prompt_id, s.score, s.text()) for s in run.samples] == [
            ("eval", 4, "3", 2.0, "yes 2"),
            ("train", 4, "e/3", 2.0, "yes 0"),
            ("train", 4, "e/3", 0.0, "yes 1"),
        ]
    tokens = run.samples[0].tokens
    assert tokens is not None
    assert list(tokens.pieces) == [" 1", " 2", " 3", " 4", " 5"]
    assert list(tokens.sampled) == [False, False, False, True, True]
    assert tokens.arrays == {"logprob": [None, None, None, -0.5, -1.5]}
    assert "not trained on are in all/traces.jsonl" in run.notes[0]


def test_flat_rollouts_of_prime_rl_and_results_of_verifiers(tmp_path: Path) -> None:
    flat = {
        "example_id": 5,
        "task": "math",
        "prompt": [{"role": "user", "content": "q"}],
        "completion": [{"role": "assistant", "content": "a"}],
        "reward": 0.5,
        "answer": "b",
        "format_reward": 1.0,
        "is_truncated": True,
    }
    write_lines(tmp_path / "run" / "rollouts" / "step_2" / "train_rollouts.jsonl", flat, {**flat, "reward": 0.0})
    run = read(tmp_path / "run")
    assert [(s.step, s.prompt_id, s.sample, s.score) for s in run.samples] == [
        (2, "math/5", 0, 0.5),
        (2, "math/5", 1, 0),
    ]
    assert run.samples[0].components == {"format_reward": 1.0}
    assert run.samples[0].truncated
    assert read(write_lines(tmp_path / "results.jsonl", flat)).format == "verifiers traces"


def summary(group: int, number: int, reward: float, **step: Any) -> dict[str, Any]:
    turn = {
        "step_idx": 0,
        "ob_len": 9,
        "ac_len": 4,
        "reward": reward,
        "metrics": {"correct": reward},
        "logs": {},
        **step,
    }
    return {
        "schema_version": 1,
        "split": "train",
        "iteration": 10,
        "group_idx": group,
        "traj_idx": number,
        "tags": ["math"],
        "total_reward": reward,
        "final_reward": 0.0,
        "trajectory_metrics": {},
        "steps": [turn],
        "final_ob_len": 0,
    }


def test_rollout_summaries_of_tinker_cookbook(tmp_path: Path) -> None:
    trace = {
        "prompt": {"type": "conversation", "messages": [{"role": "user", "content": "1+1?"}]},
        "policy_response": {"type": "conversation", "messages": [{"role": "assistant", "content": "2"}]},
    }
    whole = {
        **summary(1, 0, 0.0),
        "conversation": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}],
    }
    file = tmp_path / "iteration_000010" / "train_rollout_summaries.jsonl"
    silent = {**summary(2, 0, 1.0, stop_reason="length"), "split": "eval/gsm8k"}
    write_lines(file, summary(0, 0, 1.0, trace=trace), summary(0, 1, 0.0, trace=trace), whole, silent)
    write_lines(tmp_path / "metrics.jsonl", {"progress/batch": 10, "env/all/reward/total": 0.5})
    run = read(tmp_path)
    assert run.format == "tinker-cookbook rollout summaries"
    assert [(s.step, s.lane, s.prompt_id, s.sample, s.score, s.text()) for s in run.samples] == [
        (10, "train", "1+1?", 0, 1.0, "2"),
        (10, "train", "1+1?", 1, 0.0, "2"),
        (10, "train", "?", 0, 0.0, "!"),
        (10, "eval", "eval/gsm8k/10/2", 0, 1.0, ""),
    ]
    assert run.samples[0].components == {"correct": 1.0}
    assert run.samples[3].truncated
    assert run.curve("reward/mean") == [(10, 0.5)]
    assert run.notes == ["1 of 4 trajectories were recorded without their text"]


def test_groups_of_tinker_cookbook_whose_prompts_end_in_the_same_words_are_several(tmp_path: Path) -> None:
    file = tmp_path / "iteration_000010" / "train_rollout_summaries.jsonl"
    rows = [
        {
            **summary(group, number, score),
            "conversation": [
                {"role": "system", "content": f"The number is {group}."},
                {"role": "user", "content": "Guess"},
                {"role": "assistant", "content": "5"},
            ],
        }
        for group, number, score in ((0, 0, 0.0), (0, 1, 0.0), (1, 0, 1.0), (1, 1, 0.0))
    ]
    write_lines(file, *rows)
    run = read(tmp_path)
    assert [[sample.score for sample in group] for group in run.groups()] == [[0.0, 0.0], [1.0, 0.0]]
    assert [sample.prompt_id for sample in run.samples] == ["Guess", "Guess", "Guess (2)", "Guess (2)"]


@pytest.mark.parametrize(
    ("name", "lane"),
    [
        ("retrieval.jsonl", "train"),
        ("medieval/traces.jsonl", "train"),
        ("eval.jsonl", "eval"),
        ("eval_rollouts_3.jsonl", "eval"),
        ("my-evaluation.jsonl", "eval"),
        ("step_3/eval/traces.jsonl", "eval"),
    ],
)
def test_the_name_of_a_file_says_whether_it_is_an_evaluation(tmp_path: Path, name: str, lane: str) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    write_lines(tmp_path / name, {"prompt": "p", "completion": "c", "reward": True, "example_id": 1})
    [sample] = read(tmp_path / name).samples
    assert (sample.lane, sample.score) == (lane, 1.0)


def test_scores_of_inspect_that_are_true_and_false_are_one_and_nought(tmp_path: Path) -> None:
    record = {"id": 1, "epoch": 1, "messages": [], "scores": {"right": {"value": False}, "short": {"value": True}}}
    [sample] = read(deflated_log(tmp_path / "bools.eval", json.dumps(record))).samples
    assert sample.components == {"right": 0.0, "short": 1.0}
    assert sample.score == 0.5


def test_rollouts_of_open_instruct(tmp_path: Path) -> None:
    record = {
        "step": 3,
        "sample_idx": 0,
        "prompt_idx": 0,
        "prompt_tokens": [1, 2],
        "response_tokens": [7, 8],
        "reward": 10.0,
        "advantage": 0.5,
        "finish_reason": "length",
        "dataset": "gsm8k",
        "ground_truth": [4],
        "request_info": {"num_calls": 0},
        "logprobs": [-1.0, -2.0],
    }
    write_lines(tmp_path / "run_rollouts_000000.jsonl", record, {**record, "sample_idx": 1, "reward": 0.0})
    write_lines(tmp_path / "run_metadata.jsonl", {"run_name": "run"})
    run = read(tmp_path)
    assert run.format == "open-instruct rollouts"
    [group] = run.groups()
    assert [sample.score for sample in group] == [10.0, 0.0]
    assert group[0].text() == "token ids: 7 8"
    assert group[0].truncated
    assert group[0].tokens is not None
    assert group[0].tokens.arrays == {"advantage": [0.5, 0.5], "logprob": [-1.0, -2.0]}
    assert "ids of tokens and not their texts" in run.notes[0]


@pytest.mark.parametrize("line", ['{"nodes": 3}', '{"traces": [{"nodes": [1]}]}', '{"nodes": [], "rewards": 4}'])
def test_a_trace_with_other_fields_is_named_by_its_line(tmp_path: Path, line: str) -> None:
    shutil.copy(TRACES, tmp_path / "traces.jsonl")
    with (tmp_path / "traces.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ViewError, match=r"traces\.jsonl', record 5: its fields are not those of this format"):
        read(tmp_path)


def test_no_reader_unpickles_or_imports_what_could() -> None:
    for file in (HERE.parent / "rlcore_view").rglob("*.py"):
        text = file.read_text("utf-8")
        assert not any(word in text for word in ("pickle", "torch", "marshal", "shelve", "eval(", "exec(")), file
