"""Comparing runs: settings, seeds, prompts, and the command `diff`."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from made_runs import run_of, sample, write_rlcore_run
from omegaconf import OmegaConf
from rlcore_view import ViewError, compare
from rlcore_view.cli import main
from rlcore_view.model import Run

CONFIG = """model:
  path: /runs/one/model
data:
  sources:
    train: {path: x}
  stop: []
  list:
  - a
  - b: 1
    c: 2
train:
  seed: 0
  name: run
  dir: /runs/one
"""


def test_settings_are_read_with_their_dotted_keys() -> None:
    assert compare.settings(CONFIG) == {
        "model.path": "/runs/one/model",
        "data.sources.train": "{path: x}",
        "data.stop": "[]",
        "data.list": "a",
        "data.list.b": "1",
        "data.list.c": "2",
        "train.seed": "0",
        "train.name": "run",
        "train.dir": "/runs/one",
    }
    assert compare.settings('{"a": {"b": 1, "c": [2]}, "d": "x"}') == {"a.b": "1", "a.c": "[2]", "d": "x"}
    assert compare.settings("") == {}


def test_a_long_text_and_one_of_several_lines_are_one_value() -> None:
    long = "You are a careful assistant, and you think step by step: about arithmetic, briefly, " * 3
    several = "First rule:\n# Answer in French\n- and: briefly\n\nsecond: rule"
    values = {
        "data": {"system_prompt": long.strip(), "note": several, "last": 1},
        "stop": [long.strip(), "\n", several],
        "servers": [{"url": long.strip(), "weight": 1}, {"url": "b", "weight": 2}],
        "seed": 3,
    }
    found = compare.settings(OmegaConf.to_yaml(OmegaConf.create(values)))
    assert set(found) == {
        "data.system_prompt",
        "data.note",
        "data.last",
        "stop",
        "servers.url",
        "servers.weight",
        "seed",
    }
    assert found["data.system_prompt"] == f"'{long.strip()}'"
    assert (found["data.last"], found["servers.weight"], found["seed"]) == ("1", "1, 2", "3")
    assert found["servers.url"] == f"'{long.strip()}', b"
    assert "# Answer in French" in found["data.note"]
    assert found["stop"].count("# Answer in French") == 1


def test_runs_whose_prompts_differ_in_a_line_that_looks_like_a_comment_are_no_repetitions() -> None:
    def of(seed: int, prompt: str) -> Run:
        config = {"data": {"system_prompt": prompt}, "train": {"seed": seed, "dir": "runs"}}
        return Run(str(seed), "rlcore", [], config=OmegaConf.to_yaml(OmegaConf.create(config)))

    runs = [of(1, "Rules.\n# Answer in French\nBe brief."), of(2, "Rules.\n# Never think\nBe brief.")]
    assert compare.families(runs) == [0, 1]
    assert [key for key, _ in compare.changes(runs)] == ["data.system_prompt"]


def test_runs_that_differ_in_their_seed_and_place_are_one_family() -> None:
    other = CONFIG.replace("/runs/one", "/runs/two").replace("seed: 0", "seed: 1")
    third = CONFIG.replace("stop: []", "stop: [x]")
    runs = [replace(run_of([sample()]), config=config) for config in (CONFIG, other, third)]
    assert compare.families(runs) == [0, 0, 1]
    assert compare.changes(runs) == [("data.stop", ["[]", "[]", "[x]"])]


@pytest.mark.parametrize(
    ("place", "path"),
    [(".", "rw.py:score"), ("", "a.jsonl"), ("runs", "/data/runs_old/a.jsonl"), ("/runs", "/runs_old/a.jsonl"),
     ("/runs", "/data/runs/a.jsonl")],
)  # fmt: skip
def test_a_value_that_only_contains_the_directory_of_a_run_stays_whole(place: str, path: str) -> None:
    def of(path: str) -> Run:
        values = {"path": path, "temperature": 1.0, "train": {"dir": place}}
        return replace(run_of([sample()]), config=OmegaConf.to_yaml(OmegaConf.create(values)))

    cut = path.replace(place, "") if place else "b.jsonl"
    assert compare.changes([of(path), of(cut)]) == [("path", [path, cut])]
    assert compare.families([of(path), of(cut)]) == [0, 1]


def test_a_setting_is_shown_as_it_is_for_runs_of_different_directories() -> None:
    configs = ("rate: 0.2\ntrain:\n  dir: .\n", "rate: 1.0\ntrain:\n  dir: runs\n")
    runs = [replace(run_of([sample()]), config=config) for config in configs]
    assert compare.changes(runs) == [("rate", ["0.2", "1.0"])]


def test_runs_without_configuration_are_a_family_by_their_names() -> None:
    runs = [replace(run_of([sample()]), name=name) for name in ("grpo_seed0", "grpo_seed1", "ppo", "other")]
    assert compare.families(runs) == [0, 0, 1, 2]
    assert compare.changes(runs) == []


def test_words_that_only_one_text_has_are_marked() -> None:
    assert compare.marked("the cat sat", "the dog sat down") == "the [-cat-]{+dog+} sat{+ down+}"
    assert compare.marked("", "a") == "{+a+}"
    assert compare.marked("same", "same") == "same"


@pytest.mark.parametrize(("name", "found"), [("sums/1", "sums/1"), ("1", "sums/1"), ("ms/0", "sums/0")])
def test_a_prompt_is_found_by_its_name_its_end_or_a_part(tmp_path: Path, name: str, found: str) -> None:
    from rlcore_view import read

    assert compare.prompt_named([read(write_rlcore_run(tmp_path / "sums"))], name) == found


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("sums", "2 prompts have this name, such as 'sums/0'; write one whole"),
        ("p17", "they share 2, such as 'sums/0'"),
    ],
)
def test_a_prompt_that_is_not_one_is_refused(tmp_path: Path, name: str, problem: str) -> None:
    from rlcore_view import read

    with pytest.raises(ViewError, match=problem):
        compare.prompt_named([read(write_rlcore_run(tmp_path / "sums"))], name)


@pytest.fixture
def two(tmp_path: Path) -> list[str]:
    first, second = write_rlcore_run(tmp_path / "first"), write_rlcore_run(tmp_path / "second", text="5 ")
    (second / "config.yaml").write_text("actor:\n  lr: 2.0e-05\n")
    (second / "metrics.jsonl").write_text('{"step": 2, "reward/mean": 0.75}\n')
    return [str(first), str(second)]


def test_diff_says_what_two_runs_differ_in(two: list[str], capsys) -> None:
    assert main(["diff", *two]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == ["a: first", "b: second", "actor.lr: 1.0e-05 | 2.0e-05", "reward/mean: 0.5 | 0.75"]
    assert lines[4] == "2 prompts of both, mean reward, largest difference first"
    assert main(["diff", *two, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["config"] == [{"key": "actor.lr", "a": "1.0e-05", "b": "2.0e-05"}]
    assert found["prompts"][0] == {"prompt": "sums/0", "a": 0.5, "b": 0.5, "difference": 0.0}


def test_diff_of_a_prompt_shows_both_runs_last_samples(two: list[str], capsys) -> None:
    assert main(["diff", *two, "--prompt", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["sums/1", "first, step 2: rewards 1 0", "second, step 2: rewards 1 0"]
    assert lines[-1] == "[-4é!-]{+5 +}1"
    assert main(["diff", *two, "--prompt", "1", "--step", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [side["step"] for side in found["runs"]] == [1, 1]
    assert [entry["reward"] for entry in found["runs"][1]["samples"]] == [1.0, 0.0]
    assert main(["diff", *two, "--prompt", "1", "--step", "9"]) == 2
    assert "has no samples of it in step 9; leave --step out" in capsys.readouterr().err


def test_runs_of_one_name_are_distinguished_by_their_paths(tmp_path: Path, capsys) -> None:
    paths = [str(write_rlcore_run(tmp_path / name / "run")) for name in ("one", "two")]
    assert main(["diff", *paths]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == ["a: one", "b: two"]


def test_the_segments_of_a_sample_count_once() -> None:
    parts = [sample(1, 0, 0, 0.0, segment=segment) for segment in range(3)]
    run = run_of([*parts, sample(1, 0, 1, 1.0)])
    [row] = compare.prompts_of_both(run, run)
    assert (row["a"], row["b"]) == (0.5, 0.5)


def posed(*texts: str, score: float = 0.0, system: str = "") -> Run:
    """A run that trained on these questions, in the order of its file."""
    before = [{"role": "system", "content": system}] if system else []
    prompts = [[*before, {"role": "user", "content": text}] for text in texts]
    return run_of([sample(1, number, 0, score, prompt=prompt) for number, prompt in enumerate(prompts)])


def test_prompts_of_one_name_that_are_other_questions_are_not_compared() -> None:
    first, second = posed("2+2", "easy 1", "easy 2"), posed("2+2", "hard 1", "hard 2", score=1.0)
    found = compare.summary(first, second)
    assert [(row["prompt"], row["difference"]) for row in found["prompts"]] == [("all/0", 1.0)]
    assert found["other_questions"] == 2
    assert compare.prompt_named([first, second], "0") == "all/0"
    with pytest.raises(ViewError, match=r"they share 1, such as 'all/0'; 2 more are other questions in each run"):
        compare.prompt_named([first, second], "1")


def test_prompts_that_differ_in_their_system_message_are_compared() -> None:
    found = compare.summary(posed("2+2", system="Be brief."), posed("2+2", system="Think."))
    assert (len(found["prompts"]), found["other_questions"]) == (1, 0)


def test_a_prompt_is_the_question_of_training_and_of_its_first_turn() -> None:
    held_out = sample(0, 0, 0, lane="eval", prompt=[{"role": "user", "content": "another"}])
    later = sample(1, 0, 0, segment=1, prompt=[{"role": "user", "content": "question 0, and more"}])
    assert compare.questions([run_of([held_out, later, sample()]), run_of([sample()])]) == [{"all/0": 0}] * 2


def test_diff_says_how_many_prompts_of_one_name_are_other_questions(two: list[str], capsys) -> None:
    file = Path(two[1]) / "trajectories" / "step_000001.jsonl"
    file.write_text(file.read_text().replace("1+0=", "7+0=").replace("1+1=", "7+1="))
    assert main(["diff", *two]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[4:] == [
        "1 prompts of both, mean reward, largest difference first",
        "  sums/0: 0.5 | 0.5",
        "1 prompts of the same name are other questions in each run, and left out",
    ]
