"""Exceptions of reward functions: file and line of the user's code, the row's columns, once in each place."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlcore.cli import main
from rlcore.config import RewardFunctionConfig
from rlcore.errors import ANSWERED, ChildError, RewardError
from rlcore.report.metrics import read_trajectories
from rlcore.reward.raised import MAX_COLUMNS, raise_with_line
from rlcore.testing.rewards import make_prompt, make_trajectory, score_rewards
from rlcore.testing.runs import run_settings
from rlcore.types import Prompt

REWARDS = """
import json
from helper import value_of

def deep(completions, **columns):
    return [value_of({"x": 1}) for _ in completions]

async def late(completions, **columns):
    return [json.loads("{") for _ in completions]

def leaves(trajectory):
    raise SystemExit(3)

def trl(prompts, completions, **columns):
    return [float(completion.strip() == "a") for completion in completions]

class Smooths:
    def score(self, trajectory):
        return 1.0

    def post_process_scores(self, scores, target):
        return [target[0]["x"]]
"""
HELPER = "def value_of(row):\n    return row['answer']\n"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with functions that raise."""
    (tmp_path / "rew.py").write_text(REWARDS)
    (tmp_path / "helper.py").write_text(HELPER)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def error_of(place: Path, name: str, prompt: Prompt | None = None) -> str:
    """The error of one function's reward for one sample."""
    settings = RewardFunctionConfig(f"{place}/rew.py:{name}", children=1)
    [reward] = score_rewards({"f": settings}, [make_trajectory(prompt or make_prompt(target=1, level=2))]).values()
    return str(reward.info["error"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("deep", "f: helper.py:2: KeyError: 'answer' (the row has answer, level, target)"),
        ("late", "f: rew.py:9: JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2"),
        ("leaves", "f: rew.py:12: it called sys.exit(3)"),
        ("Smooths", "f: post_process: rew.py:22: TypeError: 'int' object is not subscriptable (the row has answer"),
    ],
)
def test_an_error_names_the_users_line_and_the_columns(place: Path, name: str, error: str) -> None:
    assert error_of(place, name).startswith(error)


@pytest.mark.slow
def test_text_code_that_gets_messages_is_an_error_that_shows_their_form(place: Path) -> None:
    conversation = replace(make_prompt(), conversational=True)
    assert error_of(place, "trl", conversation).endswith(
        "AttributeError: 'list' object has no attribute 'strip' (the row has answer; its prompts and completions are "
        "lists of messages: the text is completion[-1]['content'])"
    )


def error_from(call: Callable[[], Any], prompt: Prompt | None = None) -> str:
    """The error as which the exception of the call leaves."""
    with pytest.raises(ChildError) as raised:
        as_code_of_a_user(call, prompt or make_prompt())
    return str(raised.value)


def as_code_of_a_user(call: Callable[[], Any], prompt: Prompt) -> None:
    try:
        call()
    except ANSWERED as cause:
        raise_with_line(cause, [make_trajectory(prompt)])


def test_an_error_of_rlcore_stays_as_it_is() -> None:
    def refuse() -> None:
        raise RewardError("the service has no place")

    with pytest.raises(RewardError, match=r"^the service has no place$"):
        as_code_of_a_user(refuse, make_prompt())


def compiled(file: str) -> Callable[[], Any]:
    """A function of a file with that name, which raises in its second line, in code of json."""
    names: dict[str, Any] = {}
    exec(compile("def f():\n    return __import__('json').loads('[')", file, "exec"), names)
    return names["f"]


@pytest.mark.parametrize(
    ("file", "where"),
    [
        ("<ipython-input-3>", "<ipython-input-3>:2"),
        ("/elsewhere/rew.py", "/elsewhere/rew.py:2"),
        ("a\nb.py", "a b.py:2"),
        ("/venv/lib/site-packages/theirs/rew.py", "/venv/lib/site-packages/theirs/rew.py:2"),
    ],
)
def test_where_code_stands_is_one_line_whatever_its_file_is_called(file: str, where: str) -> None:
    assert error_from(compiled(file)).startswith(f"{where}: JSONDecodeError")


def test_what_is_installed_below_the_users_directory_is_not_the_users() -> None:
    inner = compiled("/mine/.venv/lib/site-packages/theirs.py")
    names: dict[str, Any] = {"inner": inner}
    exec(compile("\n\ndef f():\n    inner()", "/mine/rew.py", "exec"), names)
    assert error_from(names["f"]).startswith("/mine/rew.py:4: ")


def test_no_more_columns_are_named_than_fit_on_a_screen() -> None:
    prompt = make_prompt(**{f"column{index:03}": index for index in range(500)})
    assert error_from(lambda: {}["x"], prompt).count("column") == MAX_COLUMNS - 1


def arguments_of(place: Path, **more: Any) -> list[str]:
    """A run of `late`, unless another is named, as arguments of the command."""
    settings = run_settings(place, 4, **{"reward.functions.letters.fn": "rew.py:late", **more})
    return [f"{key}={json.dumps(value) if value == 'null' else value}" for key, value in settings.items()]


@pytest.mark.slow
def test_each_place_tells_it_once_without_secrets(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "hunter2hunter2")
    (place / "rew.py").write_text("def f(completions, **_):\n    raise KeyError('hunter2hunter2\\x1b[31m')\n")
    settings = {"train.name": "run", "reward.error_budget_frac": 0.0, "reward.functions.letters.fn": "rew.py:f"}
    assert main(["train", "--plugin", "null", *arguments_of(place, **settings)]) == 2
    shown, log = capsys.readouterr().err, (place / "runs" / "run" / "log.txt").read_text()
    line = "letters: rew.py:2: KeyError: '${oc.env:SOME_API_KEY}\\x1b[31m' (the row has "
    assert shown.count("rew.py:2") == 1
    assert line in shown
    assert log.count(line) == 1
    assert not any(os.sep in word for word in shown.split() if "rew.py" in word)


@pytest.mark.slow
def test_samples_and_findings_of_a_growing_run_show_its_progress(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"train.name": "run", "reward.error_budget_frac": 1.0, "train.max_steps": 1}
    assert main(["train", "--plugin", "null", *arguments_of(place, **settings)]) == 0
    error = "letters: rew.py:9: JSONDecodeError: Expecting property name"
    samples = list(read_trajectories(place / "runs" / "run", 1))
    assert [sample["info"]["error"].startswith(error) for sample in samples] == [True] * 4
    shown, log = capsys.readouterr().out, (place / "runs" / "run" / "log.txt").read_text()
    assert f"rewards fail: 4 of 4 samples have no reward, such as: {error}" in shown
    assert log.count("Traceback") == 1
