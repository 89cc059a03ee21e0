"""`rlcore plan` scores a canary with reward functions: it reports or refuses the score, and does nothing else."""

import json
import sys
from pathlib import Path

import pytest

from rlcore.cluster.interpreter import run_in_new_interpreter
from rlcore.errors import RewardError
from rlcore.plugins.planning import plan_run
from rlcore.runtime import canary_preview
from rlcore.runtime.data_preview import preview_data
from rlcore.testing.runs import run_settings

ROWS = [{"prompt": f"say {index}", "answer": str(index)} for index in range(6)]
RIGHT = (
    "def right(completions, answer):\n"
    "    return [float(text == f'It is {right}') for text, right in zip(completions, answer)]\n"
)


def canary_notes(directory: Path, source: str, *overrides: str, name: str = "right") -> list[str]:
    """The notes of a plan on the canary of a function in a file."""
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (directory / "scores.py").write_text(source)
    settings = run_settings(directory, 2, **{"reward.functions.letters.fn": f"{directory}/scores.py:{name}"})
    settings["data.sources.all.path"] = str(directory / "rows.jsonl")
    words = ["model.tokenizer=bytes", "reward.canary=It is {answer}", *overrides]
    return [note for note in preview_data(plan_run([settings], words, ["null"])).notes if note.startswith("canary")]


@pytest.mark.slow
def test_the_score_of_the_canary_is_said(tmp_path: Path) -> None:
    [note] = canary_notes(tmp_path, RIGHT)
    assert note == "canary: 4 known-good responses score 1 or more; needs 0.5"


@pytest.mark.slow
def test_a_canary_that_scores_too_little_is_refused_as_in_training(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"response 'So 0' to prompt 'all/0' scored 0 .*canary_min=0.5"):
        canary_notes(tmp_path, RIGHT, "reward.canary=So {answer}")


@pytest.mark.slow
def test_a_reward_that_raises_is_refused_with_its_line_and_nothing_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(RewardError, match=r"did not get a score: .*scores.py:2: ZeroDivisionError"):
        canary_notes(tmp_path, "def right(completions, answer):\n    1 / 0\n".replace("    print('noise')\n", ""))
    assert caplog.records == []


def test_a_reward_that_does_not_end_is_killed_and_left_to_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(canary_preview, "DEADLINE_S", 0.1)
    [note] = canary_notes(tmp_path, "import time\n\ndef right(completions, answer):\n    time.sleep(60)\n")
    assert note == "canary: no score within 0.1 s, which is as long as a plan waits; training calls it again"


def test_a_plan_that_does_not_read_the_prompts_says_that_the_canary_was_not_called(tmp_path: Path) -> None:
    [note] = canary_notes(tmp_path, RIGHT, "data.sources.more={task: chain_sum, split: train}")
    assert note == (
        "canary: not called by the plan, but when training starts: the plan does not read all training prompts"
    )


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import requests\n" + RIGHT, "imports requests, so it may ask a service"),
        ("def other():\n    from urllib.request import urlopen\n\n\n" + RIGHT, "imports urllib.request"),
        ("async " + RIGHT, "is async, so it would run in the plan's process"),
        ("class right:\n    async def score(self, trajectory):\n        return 1.0\n", "is async, so it would run"),
        ("def keep(f):\n    return f\n\n\n@keep\n" + RIGHT, "does not show whether it is async"),
    ],
)
def test_functions_that_may_ask_a_service_are_not_called(tmp_path: Path, source: str, words: str) -> None:
    called = "open(__file__ + '.called', 'w')\n"
    [note] = canary_notes(tmp_path, called + source)
    assert note.startswith("canary: not called by the plan, but when training starts: ")
    assert words in note
    assert not (tmp_path / "scores.py.called").exists()


@pytest.mark.slow
def test_the_plan_imports_neither_the_function_nor_torch(tmp_path: Path) -> None:
    canary_notes(tmp_path, RIGHT)
    assert "scores" not in sys.modules
    code = (
        "import sys\n"
        f"from rlcore.plugins.planning import plan_run; from rlcore.runtime.data_preview import preview_data\n"
        f"plan = plan_run([], {words_of(tmp_path)!r}, ['null'])\n"
        "print([note for note in preview_data(plan).notes if note.startswith('canary')], 'torch' in sys.modules)"
    )
    done = run_in_new_interpreter(code, 60.0)
    assert done is not None
    assert done.output == "['canary: 4 known-good responses score 1 or more; needs 0.5'] False\n", done.errors


def words_of(directory: Path) -> list[str]:
    """The overrides of a run without a model."""
    return [
        "model.path=none",
        "model.tokenizer=bytes",
        "actor.backend=null",
        "rollout.backend=null",
        f"data.sources.all.path={directory}/rows.jsonl",
        f"reward.functions.letters.fn={directory}/scores.py:right",
        "reward.canary=It is {answer}",
    ]


def test_without_a_canary_nothing_is_called(tmp_path: Path) -> None:
    assert canary_notes(tmp_path, "open(__file__ + '.called', 'w')\n" + RIGHT, "reward.canary=") == []
    assert not (tmp_path / "scores.py.called").exists()
