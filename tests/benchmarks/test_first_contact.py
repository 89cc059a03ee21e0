"""Each mistake of a first day that is found before a run starts is answered in one line, and leaves nothing behind."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent.parent / "benchmarks"))
import first_contact
from first_contact_runs import RUN_MISTAKES, RunMistake, made

SLOW = {mistake.name for mistake in first_contact.MISTAKES if "canary" in mistake.name}
"""A child is started; tests/runtime/test_canary_preview.py has the canaries."""


QUICK = [mistake for mistake in first_contact.MISTAKES if mistake.name not in SLOW]


@pytest.mark.parametrize("mistake", QUICK, ids=[mistake.name for mistake in QUICK])
def test_a_mistake_is_answered_in_one_line_with_the_way_out(
    mistake: first_contact.Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in {**first_contact.FILES, **mistake.files}.items():
        Path(name).write_text(text, "utf-8")
    answer = first_contact.answered(mistake)
    assert answer["as_expected"], answer
    assert answer["left"] == []


@pytest.mark.real
@pytest.mark.parametrize("mistake", RUN_MISTAKES, ids=[run.name for run in RUN_MISTAKES])
def test_a_mistake_in_a_run_is_answered_with_the_way_out(
    mistake: RunMistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in first_contact.FILES.items():
        Path(name).write_text(text, "utf-8")
    answer = made(mistake, (*first_contact.RUN, *first_contact.NULL))
    assert answer["as_expected"], (answer, Path("output").read_text("utf-8"))
