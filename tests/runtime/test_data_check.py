"""Data that every reward call would fail on is refused before anything starts."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rlcore.data import load_prompts
from rlcore.errors import ConfigError
from rlcore.plugins.planning import plan_run
from rlcore.runtime import data_preview
from rlcore.runtime.data_check import check_data
from rlcore.testing.runs import run_settings

REWARDS = """
def takes_answer(prompts, completions, answer, **columns): ...
def takes_target(prompts, completions, target, bonus, **columns): ...
def takes_anwser(completions, anwser): ...
def may_take_target(prompts, completions, target=None): ...
async def waits_for_target(completions, target): ...
def compares(data_source, solution_str, ground_truth, extra_info=None):
    return float(ground_truth in solution_str)
def looks(data_source, solution_str, ground_truth, extra_info=None):
    return float(len(solution_str))
def by_trajectory(trajectory): ...
def decorated(call): return call
@decorated
def unreadable(completions, target): ...
class Compares:
    def score(self, completions, target): ...
class Nothing:
    pass
class Inherits(Compares):
    pass
"""


def notes(directory: Path, rows: list[dict[str, Any]], *overrides: str, fn: str = "count_letter") -> list[str]:
    """The notes on `rows` for the reward function `fn`, whose name is that of REWARDS or an offer."""
    (directory / "rewards.py").write_text(REWARDS)
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    named = fn if fn in ("count_letter", "exact_match", "format_match") else f"{directory}/rewards.py:{fn}"
    settings = run_settings(directory, 4, **{"reward.functions.letters.fn": named})
    settings["data.sources.all.path"] = str(directory / "rows.jsonl")
    plan = plan_run([settings], overrides, ["null"])
    data = plan.config.data
    return check_data(plan, load_prompts(data.sources, data), load_prompts(plan.config.eval.sources, data))


PLAIN = [{"prompt": f"say {index}"} for index in range(4)]
ANSWERED = [{**row, "answer": "a"} for row in PLAIN]
VERL = [{**row, "reward_model": {"ground_truth": "a"}} for row in PLAIN]
TARGETED = [{**row, "target": "a", "bonus": 1} for row in PLAIN]
MISSPELT = [{**row, "targets": "a"} for row in PLAIN]


@pytest.mark.parametrize(
    ("fn", "rows", "lacks"),
    [
        ("takes_answer", PLAIN, "needs an answer, which source all does not have"),
        ("takes_answer", ANSWERED, ""),
        ("takes_answer", VERL, ""),
        ("takes_target", PLAIN, "needs bonus, target, which source all does not have"),
        ("takes_target", TARGETED, ""),
        ("takes_target", MISSPELT, "needs bonus, target (did you mean 'targets' instead of 'target'?), which source"),
        ("takes_anwser", ANSWERED, "needs anwser (did you mean 'answer' instead of 'anwser'?), which source all does"),
        ("takes_anwser", PLAIN, "needs anwser, which source all does not have"),
        ("may_take_target", PLAIN, ""),
        ("waits_for_target", PLAIN, "needs target"),
        ("compares", PLAIN, "data.sources.all.answer_column"),
        ("compares", VERL, ""),
        ("looks", PLAIN, ""),
        ("by_trajectory", PLAIN, ""),
        ("unreadable", PLAIN, ""),
        ("Compares", PLAIN, "needs target"),
        ("Nothing", PLAIN, "has no method score and no compute_score"),
        ("Inherits", PLAIN, ""),
        ("exact_match", PLAIN, "needs an answer"),
        ("exact_match", ANSWERED, ""),
        ("format_match", PLAIN, ""),
        ("count_letter", PLAIN, ""),
    ],
)
def test_a_column_that_a_function_needs_and_no_row_has_is_refused(
    tmp_path: Path, fn: str, rows: list[dict[str, Any]], lacks: str
) -> None:
    if not lacks:
        assert notes(tmp_path, rows, fn=fn) == []
        return
    with pytest.raises(ConfigError, match=re.escape(lacks)):
        notes(tmp_path, rows, fn=fn)


def test_what_kwargs_bind_is_not_a_column(tmp_path: Path) -> None:
    bound = "reward.functions.letters.kwargs={target: a, bonus: 1}"
    assert notes(tmp_path, PLAIN, bound, fn="takes_target") == []


def test_one_source_of_two_without_the_column_is_a_note(tmp_path: Path) -> None:
    (tmp_path / "more.jsonl").write_text("".join(json.dumps(row) + "\n" for row in TARGETED))
    [note] = notes(tmp_path, PLAIN, f"data.sources.more.path={tmp_path}/more.jsonl", fn="takes_target")
    assert note == "reward.functions.letters: needs bonus, target, which source all does not have: its samples fail"


def test_prompts_that_end_with_the_assistants_message_are_noted(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "say"}, {"role": "assistant", "content": "a"}]
    [note] = notes(tmp_path, [{"prompt": turns}, *PLAIN])
    assert "1 of 5 prompts end with a message of the assistant" in note


def test_roles_that_chat_templates_do_not_know_are_noted(tmp_path: Path) -> None:
    known = ("system", "developer", "assistant", "tool", "user")
    turns = [{"role": role, "content": "say"} for role in (*known, "wizard", "User", "user")]
    [note] = notes(tmp_path, [PLAIN[0], {"prompt": turns}, *PLAIN[1:], {"prompt": turns}])
    assert note == (
        "data.sources.all: messages with a role other than system, user, assistant, tool, developer: 4, such as "
        "'wizard' in all/1 ('say'), which a chat template may drop or misread; correct the role"
    )


def test_columns_with_names_of_other_arguments_are_noted(tmp_path: Path) -> None:
    [note] = notes(tmp_path, [{**PLAIN[0], "completions": "a", "step": 1}, {**PLAIN[1], "settings": {}}])
    assert note == (
        "data.sources.all: list-style reward functions do not get the columns completions, settings, because these "
        "names mean something else in a call; rename them"
    )


def test_rows_that_repeat_within_a_step_are_noted(tmp_path: Path) -> None:
    [note] = notes(tmp_path, PLAIN, "train.prompts_per_step=5")
    assert "the sources hold 4 prompts" in note


def test_a_plan_notes_a_library_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(data_preview, "library_of", lambda plugin: "surely_not_here" if plugin == "null" else "")
    monkeypatch.setattr(data_preview, "install_hint", lambda plugin: "`pip install it`")
    [note] = data_preview.missing_libraries(plan_run([run_settings(tmp_path, 4)], [], ["null"]))
    assert note.startswith("surely_not_here is not installed in this Python")
    assert note.endswith("`pip install it`")
