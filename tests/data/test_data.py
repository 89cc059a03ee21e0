"""Prompts: read from files, datasets and tasks; wrong sources are named."""

import hashlib
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rlcore.config import DataConfig, SourceConfig
from rlcore.data import load_prompts, refuse_overlap
from rlcore.data.rows import read_rows
from rlcore.errors import ConfigError, RewardError
from rlcore.reward.scorers import reasoning_gym as reasoning_gym_reward
from rlcore.testing.rewards import make_prompt, make_trajectory
from rlcore.types import Message, Prompt, Reward, frozen_messages

ROOT = Path(__file__).parents[2]


def write_lines(path: Path, rows: Sequence[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def load_one(source: SourceConfig) -> list[Prompt]:
    data = DataConfig(sources={"math": source})
    return load_prompts(data.sources, data)["math"]


def user(text: str) -> tuple[Message, ...]:
    return frozen_messages([{"role": "user", "content": text}])


def prompts_of(source: str, n: int) -> list[Prompt]:
    return [Prompt(f"{source}/{i}", user(f"{source} question {i}"), str(i), source) for i in range(n)]


def test_a_text_becomes_one_user_message_and_other_columns_pass_through(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1?", "answer": "2", "level": 3, "tags": ["a", {"b": 1}]}, {"prompt": "2+2?", "answer": None}]
    first, second = load_one(SourceConfig(path=write_lines(tmp_path / "a.jsonl", rows)))
    assert (first.id, first.source, first.answer) == ("math/0", "math", "2")
    assert [dict(message) for message in first.messages] == [{"role": "user", "content": "1+1?"}]
    assert dict(first.columns) == {"level": 3, "tags": ["a", {"b": 1}]}
    assert (second.id, second.answer, dict(second.columns)) == ("math/1", None, {})
    with pytest.raises(TypeError):
        first.columns["level"] = 4  # type: ignore[index]
    assert dict(pickle.loads(pickle.dumps(first)).columns) == dict(first.columns)


@pytest.mark.parametrize("column", ["prompt", "messages", "question"])
@pytest.mark.parametrize("answer", ["answer", "solution", "ground_truth"])
def test_the_usual_column_names_are_found(tmp_path: Path, column: str, answer: str) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    (prompt,) = load_one(SourceConfig(path=write_lines(tmp_path / "a.jsonl", [{column: messages, answer: 2, "x": 1}])))
    assert [dict(message) for message in prompt.messages] == messages
    assert prompt.answer == 2
    assert dict(prompt.columns) == {"x": 1}


def test_columns_can_be_named_and_the_usual_ones_then_pass_through(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"prompt": "p", "answer": "a", "task": "t", "gold": "g"}])
    (prompt,) = load_one(SourceConfig(path=path, prompt_column="task", answer_column="gold"))
    assert (prompt.messages[0]["content"], prompt.answer) == ("t", "g")
    assert dict(prompt.columns) == {"prompt": "p", "answer": "a"}


def test_data_made_for_verl_has_its_answer_and_keeps_its_columns(tmp_path: Path) -> None:
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "1+1?"}],
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"index": 0},
    }
    (prompt,) = load_one(SourceConfig(path=write_lines(tmp_path / "a.jsonl", [row])))
    assert prompt.answer == "2"
    assert dict(prompt.columns) == {key: row[key] for key in ("data_source", "reward_model", "extra_info")}


@pytest.mark.parametrize(
    ("header", "end"),
    [
        ("prompt;answer", r'answer; if ";" separates its columns, set data\.sources\.math\.options\.sep=";"$'),
        ("prompt\tanswer", r'answer; if "\\t" separates its columns, set data\.sources\.math\.options\.sep="\\t"$'),
        ("a;b,c", "one of: a;b, c$"),
    ],
)
def test_a_csv_file_of_one_column_names_the_setting_of_its_separator(tmp_path: Path, header: str, end: str) -> None:
    (tmp_path / "a.csv").write_text(f"{header}\n{header}\n")
    with pytest.raises(ConfigError, match=end):
        load_one(SourceConfig(path=str(tmp_path / "a.csv")))


def test_csv_parquet_and_directories_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    from tqdm import tqdm

    (tmp_path / "a.csv").write_text("question;answer;level\n1+1?;2;7\n2+2?;4;8\n")
    rows = load_one(SourceConfig(path=str(tmp_path / "a.csv"), options={"sep": ";"}))
    assert [(row.answer, row.columns["level"]) for row in rows] == [(2, 7), (4, 8)]

    table = datasets.Dataset.from_dict(
        {"prompt": [[{"role": "user", "content": "hi"}]] * 3, "solution": ["a", "b", "c"]}
    )
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # writing, tqdm starts a thread that stays
    table.to_parquet(tmp_path / "a.parquet")
    (tmp_path / "folder").mkdir()
    table.to_parquet(tmp_path / "folder" / "test.parquet")
    table.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"test": table}).save_to_disk(tmp_path / "saved_splits")
    monkeypatch.undo()
    for name, split in (("a.parquet", "train"), ("folder", "test"), ("saved", "train"), ("saved_splits", "test")):
        rows = load_one(SourceConfig(path=str(tmp_path / name), split=split, limit=2))
        assert [(row.messages[0]["content"], row.answer) for row in rows] == [("hi", "a"), ("hi", "b")]
    assert not datasets.are_progress_bars_disabled()


def test_limit_takes_the_first_rows_and_reads_no_further(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": "b"}\nbroken\n')
    assert [prompt.id for prompt in load_one(SourceConfig(path=str(path), limit=2))] == ["math/0", "math/1"]


def test_keep_takes_the_rows_in_whose_question_it_is_found_before_the_limit(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "a.jsonl", [{"prompt": text, "answer": "1 + 1"} for text in ("1-1", "1+1", "2+2", "3+3")]
    )
    assert [prompt.id for prompt in load_one(SourceConfig(path=path, keep=r"\+", limit=2))] == ["math/1", "math/2"]
    with pytest.raises(ConfigError, match=r"data\.sources\.math\.keep: 'x' is found in none of the 4 prompts"):
        load_one(SourceConfig(path=path, keep="x"))
    with pytest.raises(ConfigError, match=r"keep: '\(' is not a regular expression"):
        load_one(SourceConfig(path=path, keep="("))


LOCAL_ONLY = """
import os, socket, sys
def refuse(*arguments):
    raise SystemExit("network used")
socket.socket.connect = socket.getaddrinfo = refuse
from rlcore.config import DataConfig, SourceConfig
from rlcore.data import load_prompts
sources = {name: SourceConfig(path=name) for name in sys.argv[1:]}
print({name: len(prompts) for name, prompts in load_prompts(sources, DataConfig()).items()})
print(sorted(os.listdir(os.environ["HF_HOME"])), sorted(os.listdir()))
"""


@pytest.mark.fault
def test_local_files_need_no_network_and_leave_nothing_in_the_cache(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt\nx\n")
    write_lines(tmp_path / "a.jsonl", [{"prompt": "x"}, {"prompt": "y"}])
    (tmp_path / "hf").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", LOCAL_ONLY, "a.csv", "a.jsonl"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path / "hf")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "{'a.csv': 1, 'a.jsonl': 2}\n[] ['a.csv', 'a.jsonl', 'hf']\n"
    assert done.stderr == ""


@pytest.mark.fault
@pytest.mark.parametrize("name", ["rows.yaml", "rows.jsonl.gz", "rows"])
def test_a_file_of_another_kind_is_not_looked_up_on_the_hub(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("[]")
    with pytest.raises(ConfigError, match=rf"{name}' is not a kind of file that is read; needs .jsonl"):
        load_one(SourceConfig(path=str(tmp_path / name)))


@pytest.mark.slow
def test_a_dataset_that_is_not_there_is_a_configuration_error(tmp_path: Path) -> None:
    program = (
        "from rlcore.config import DataConfig, SourceConfig\nfrom rlcore.data import load_prompts\n"
        "load_prompts({'x': SourceConfig(path='no/such-dataset')}, DataConfig())"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("rlcore.errors.ConfigError: eval.sources.x: dataset 'no/such-dataset': ")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (SourceConfig(), "neither path nor task"),
        (SourceConfig(path="a.jsonl", task="chain_sum"), "path='a.jsonl' and task='chain_sum'"),
        (SourceConfig(path="gone.jsonl"), r"found no file 'gone\.jsonl' \(looked in "),
        (SourceConfig(path="god.jsonl"), r"; did you mean 'good\.jsonl'\? choose from: "),
        (SourceConfig(path="gone/a.parquet"), r"found no file .*; needs a file of rows: docs/data\.md"),
        (SourceConfig(path="good.jsonl", split="test"), r"math\.split: it is 'test', a file has no splits"),
        (SourceConfig(path="good.jsonl", subset="main"), r"math\.subset: it is 'main'"),
        (SourceConfig(path="good.jsonl", options={"sep": ";"}), r"math\.options: sep: no effect"),
        (SourceConfig(path="good.jsonl", limit=-1), r"math\.limit: it is -1"),
        (SourceConfig(path="empty.jsonl"), "has no rows"),
        (SourceConfig(path="broken.jsonl"), "line 3 is not JSON"),
        (SourceConfig(path="binary.jsonl"), "line 1 is not JSON"),
        (SourceConfig(path="list.jsonl"), "line 2 is a list; needs an object"),
        (SourceConfig(path="other.jsonl"), r"set prompt_column to one of: answer, text"),
        (SourceConfig(path="other.jsonl", prompt_column="txt"), r"no column 'txt'; did you mean 'text'\?"),
        (SourceConfig(path="good.jsonl", answer_column="anser"), r"answer_column: there is no column 'anser'"),
        (SourceConfig(path="hole.jsonl"), "line 2 has nothing in column 'prompt'"),
        (SourceConfig(path="number.jsonl"), "line 1 has int '3' in column 'prompt'"),
        (SourceConfig(path="roles.jsonl"), "line 1 has list .* needs a text, or messages with role and content"),
        (SourceConfig(path="bad.csv"), r"data\.sources\.math: 'bad\.csv'"),
        (SourceConfig(task="chainsum"), r"no task 'chainsum'; did you mean 'chain_sum'\?"),
        (SourceConfig(task="chain_sum", split="test"), "splits train and heldout"),
        (SourceConfig(task="chain_sum", heldout_frac=1.5), r"heldout_frac: it is 1\.5"),
        (SourceConfig(task="chain_sum", options={"terms": 2}), "task 'chain_sum': TypeError"),
        (SourceConfig(task="chain_sum", split="heldout", heldout_frac=0.0), "has no rows in split 'heldout'"),
    ],
)
def test_a_wrong_source_is_named_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: SourceConfig, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "good.jsonl", [{"prompt": "x", "answer": 1}])
    (tmp_path / "empty.jsonl").write_text("\n\n")
    (tmp_path / "broken.jsonl").write_text('{"prompt": "a"}\n\n{"prompt": \n')
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\n")
    write_lines(tmp_path / "list.jsonl", [{"prompt": "a"}, ["b"]])
    write_lines(tmp_path / "other.jsonl", [{"text": "a", "answer": "b"}])
    write_lines(tmp_path / "hole.jsonl", [{"prompt": "a"}, {"answer": "b"}])
    write_lines(tmp_path / "number.jsonl", [{"prompt": 3}])
    write_lines(tmp_path / "roles.jsonl", [{"prompt": [{"content": "x"}]}])
    (tmp_path / "bad.csv").write_bytes(b'prompt\n"unclosed\n' + b"\xff" * 9)
    with pytest.raises(ConfigError, match=message) as caught:
        load_one(source)
    assert str(caught.value).startswith("data.sources.math")
    assert "\n" not in str(caught.value)


def test_errors_of_held_out_sources_say_so() -> None:
    with pytest.raises(ConfigError, match=r"^eval\.sources\.a: it has neither"):
        load_prompts({"a": SourceConfig()}, DataConfig())


ADDITION = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "allow_negation": False}


def addition(split: str, seed: int, size: int = 150) -> list[Prompt]:
    return load_one(SourceConfig(task="chain_sum", split=split, size=size, seed=seed, options=ADDITION))


def test_the_splits_of_a_task_are_disjoint_and_distinct_for_every_pair_of_seeds() -> None:
    def texts(prompts: list[Prompt]) -> list[str]:
        return [str(prompt.messages[0]["content"]) for prompt in prompts]

    for train_seed, heldout_seed in ((0, 0), (0, 1), (5, 90)):
        train, heldout = texts(addition("train", train_seed)), texts(addition("heldout", heldout_seed))
        assert len(set(train)) == len(train) > 0
        assert len(set(heldout)) == len(heldout) > 0
        assert not set(train) & set(heldout)
        refuse_overlap({"a": addition("train", train_seed)}, {"b": addition("heldout", heldout_seed)})
    assert texts(addition("train", 3)) == texts(addition("train", 3))


def test_the_split_of_a_task_follows_a_hash_of_its_question() -> None:
    import reasoning_gym

    questions = list(
        dict.fromkeys(x["question"] for x in reasoning_gym.create_dataset("chain_sum", size=150, seed=0, **ADDITION))
    )
    heldout = [
        question
        for question in questions
        if int(hashlib.sha256(" ".join(question.lower().split()).encode()).hexdigest()[:16], 16) / 2**64 < 0.2
    ]
    assert [prompt.messages[0]["content"] for prompt in addition("heldout", 0)] == heldout
    assert len(addition("train", 0)) == len(questions) - len(heldout)


def test_a_scorer_can_call_score_answer_from_the_columns_of_a_task() -> None:
    import reasoning_gym

    prompt = addition("train", 0)[0]
    assert prompt.columns["task"] == "chain_sum"
    score = reasoning_gym.get_score_answer_fn(prompt.columns["task"])
    entry = {"answer": prompt.answer, "metadata": prompt.columns["metadata"]}
    assert score(prompt.answer, entry) == 1.0
    assert score("999", entry) < 0.5
    assert dict(pickle.loads(pickle.dumps(prompt)).columns) == dict(prompt.columns)


def test_reasoning_gym_tasks_judge_their_own_answers() -> None:
    """Separate from the other scorers: importing the package takes seconds, in the process that reads its tasks."""
    import reasoning_gym as gym

    item = gym.create_dataset("chain_sum", size=1, seed=3)[0]
    sum_, columns = int(item["answer"]), {"metadata": item["metadata"]}

    def judged(text: str, **more: Any) -> Reward:
        reward = reasoning_gym_reward(make_trajectory(make_prompt(0, answer=str(sum_), **more), text=text))
        assert isinstance(reward, Reward)
        return reward

    assert judged(f"The sum is {sum_}", **columns).score == 1.0
    wrong = judged(f"\\boxed{{{sum_ + 1}}}", **columns)
    assert wrong.score < 0.5
    assert wrong.info["answer"] == str(sum_ + 1)
    with pytest.raises(RewardError, match="needs the column metadata"):
        judged("1")


def test_an_answer_that_a_task_cannot_read_is_wrong_and_a_row_that_it_cannot_read_is_an_error() -> None:
    import reasoning_gym as gym

    item = gym.create_dataset("prime_factorization", size=1, seed=3)[0]

    def judged(text: str, answer: str) -> Any:
        prompt = make_prompt(0, answer=answer, metadata=item["metadata"])
        return reasoning_gym_reward(make_trajectory(prompt, text=text))

    assert judged(f"<answer>{item['answer']}</answer>", item["answer"]).score == 1.0
    unreadable = judged("<answer>two times three</answer>", item["answer"])
    assert (unreadable.score, unreadable.info["answer"]) == (0.0, "two times three")
    with pytest.raises(ValueError, match="six"):
        judged(f"<answer>{item['answer']}</answer>", "six")


def test_a_held_out_question_that_occurs_in_training_is_refused() -> None:
    train = {"one": prompts_of("one", 2), "two": [Prompt("two/0", user("What is\n 1+1?"), "2", "two")]}
    messages = frozen_messages(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "what is  1+1? "}]
    )
    heldout = {"test": [Prompt("test/0", user("other"), "", "test"), Prompt("test/1", messages, "2", "test")]}
    with pytest.raises(
        ConfigError, match=r"eval\.sources\.test: 1 of 2 .*'user: what is 1\+1\?' in data\.sources\.two"
    ):
        refuse_overlap(train, heldout)
    refuse_overlap(train, {"test": heldout["test"][:1]})


def test_a_longer_conversation_is_another_question() -> None:
    turns = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes?"},
        {"role": "user", "content": "1+1?"},
    ]
    longer = {"b": [Prompt("b/0", frozen_messages(turns), "", "b")]}
    refuse_overlap({"a": [Prompt("a/0", user("1+1?"), "", "a")]}, longer)
    with pytest.raises(ConfigError, match="held-out questions occur in training"):
        refuse_overlap(longer, longer)


@pytest.mark.parametrize("depth", [70, 400, 900])
@pytest.mark.parametrize("opened", ["[", '{"a":'])
def test_a_row_that_is_nested_deep_is_named(opened: str, depth: int, tmp_path: Path) -> None:
    closed = {"[": "]", "{": "}"}[opened[0]]
    deep = opened * depth + "1" + closed * depth
    (tmp_path / "rows.jsonl").write_text(f'{{"prompt": "a", "x": 1}}\n{{"prompt": "b", "x": {deep}}}\n')
    with pytest.raises(ConfigError, match=r"line 2 is (nested more than 64 levels deep|not JSON)"):
        read_rows(SourceConfig(path=str(tmp_path / "rows.jsonl")), "data.sources.a")


def test_a_row_that_is_nested_as_people_do_is_read(tmp_path: Path) -> None:
    deep = "[" * 40 + "1" + "]" * 40
    (tmp_path / "rows.jsonl").write_text(f'{{"prompt": "b", "x": {deep}}}\n')
    assert len(read_rows(SourceConfig(path=str(tmp_path / "rows.jsonl")), "data.sources.a")) == 1
