"""Ready-made reward functions, and where a reward came from."""

import hashlib
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlcore.contracts.components import ResolvedReward
from rlcore.contracts.offers import Scope
from rlcore.data.tokenizer import ByteTokens
from rlcore.errors import RewardError
from rlcore.plan.sources import source_file
from rlcore.reward.canary import canary
from rlcore.reward.provenance import copy_reward_files, reward_provenance
from rlcore.reward.scorers import (
    answer_text,
    boxed,
    exact_match,
    extract,
    format_match,
    gsm8k,
    last_boxed,
    length_penalty,
    math_verify,
    same_answer,
)
from rlcore.testing.rewards import make_prompt, make_trajectory
from rlcore.types import Trajectory


def sample_of(text: str, answer: Any, **columns: Any) -> Trajectory:
    return make_trajectory(make_prompt(0, answer=answer, **columns), text=text)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"first \boxed{1}, then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}} and 7", r"\frac{1}{2}"),
        (r"\boxed{5} \boxed{unclosed", "5"),
        ("<answer> x </answer> 3", "x"),
        ("It is 1,234.50 in all.", "1,234.50"),
        ("so -7", "-7"),
        ("it costs -$7", "-7"),
        ("the range is 10-15", "15"),
        ("one of 1, 2", "2"),
        ("  yes ", "yes"),
        ("", ""),
    ],
)
def test_the_answer_is_extracted(text: str, answer: str) -> None:
    assert extract(text) == answer


def test_a_response_without_a_closed_box_has_none() -> None:
    assert last_boxed(r"\boxed{1") is None
    assert last_boxed("1") is None
    assert last_boxed(r"\boxed{}") == ""


@pytest.mark.parametrize(
    ("found", "wanted", "same"),
    [
        ("2", "2", True),
        ("2.0", "2", True),
        ("1,000", "1000", True),
        ("+5", "5", True),
        ("$5", "5.00", True),
        ("12345678901234567891", "12345678901234567890", False),
        ("1{,}234", "1234", True),
        (r"1\,234\,567", "1234567", True),
        (r"10,\!000.5", "10000.5", True),
        (r"1\,23", "123", False),
        ("1,2", "12", False),
        ("1,2,3", "123", False),
        ("two", "two", True),
        ("2", "3", False),
        ("a", "1", False),
    ],
)
def test_answers_are_compared_as_text_and_as_numbers(found: str, wanted: str, same: bool) -> None:
    assert same_answer(found, wanted) is same


@pytest.mark.slow
def test_scorers_judge_and_tell_the_answer() -> None:
    for scorer in (exact_match, boxed, math_verify):
        good, bad = scorer(sample_of(r"I think \boxed{42}", "42")), scorer(sample_of(r"\boxed{41}", "42"))
        assert (good.score, bad.score) == (1.0, 0.0), scorer.__name__
        assert (good.info["answer"], bad.info["answer"]) == ("42", "41"), scorer.__name__
    assert exact_match(sample_of("42", 42)).score == 1.0
    assert boxed(sample_of("42", "42")).score == 0.0
    assert math_verify(sample_of(r"\boxed{\frac{2}{4}}", "1/2")).score == 1.0


@pytest.mark.slow
def test_math_verify_works_in_a_thread() -> None:
    """Its own limits are alarms, which only the main thread may set."""
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(math_verify, sample_of(r"\boxed{\frac{2}{4}}", "1/2")).result()
    assert found.score == 1.0


def test_a_scorer_without_an_answer_fails_by_name() -> None:
    trajectory = make_trajectory(make_prompt(0), text=r"\boxed{1}")
    object.__setattr__(trajectory.prompt, "answer", None)
    for scorer in (exact_match, boxed, math_verify):
        with pytest.raises(RewardError, match="prompt 'test/0' has no answer"):
            scorer(trajectory)


def test_a_format_is_matched_by_the_whole_response() -> None:
    assert format_match(sample_of(" <think>a\nb</think>\n<answer>3</answer>\n", "3")) == 1.0
    assert format_match(sample_of("So: <think>a</think><answer>3</answer>", "3")) == 0.0
    assert format_match(sample_of("12", "3"), pattern=r"\d+") == 1.0


def test_the_length_penalty_grows_between_its_two_bounds() -> None:
    found = {size: length_penalty(sample_of("x" * size, "3"), free=10, limit=20) for size in (1, 10, 12, 15, 20, 40)}
    assert found == {1: 0.0, 10: 0.0, 12: -0.2, 15: -0.5, 20: -1.0, 40: -1.0}
    with pytest.raises(RewardError, match="limit=10 is not above free=10"):
        length_penalty(sample_of("x", "3"), free=10, limit=10)


def resolved(name: str, target: str) -> ResolvedReward:
    return ResolvedReward(name, target, "config", 1.0, Scope.SAMPLE, 60.0)


def test_the_file_of_each_function_is_known_by_its_hash_and_copied(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def f(trajectory):\n    return 1.0\n")
    rewards = [resolved("a", f"{path}:f"), resolved("b", "rlcore.reward.scorers:boxed"), resolved("c", "no.such:f")]
    found = reward_provenance(rewards)
    assert found["a"] == {
        "target": f"{path}:f",
        "provided_by": "config",
        "path": str(path),
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }
    assert found["b"]["path"].endswith("rlcore/reward/scorers.py")
    assert (found["c"]["path"], found["c"]["sha256"]) == (None, None)
    copies = copy_reward_files(rewards, tmp_path / "run" / "rewards")
    assert copies == {"a": tmp_path / "run" / "rewards" / "a_mine.py"}
    assert copies["a"].read_text() == path.read_text()


def test_the_file_of_a_function_for_groups_is_kept_too(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def f(completions, score):\n    return score\n")
    rewards = [replace(resolved("a", "rlcore.reward.scorers:boxed"), post_process=f"{path}:f")]
    assert reward_provenance(rewards)["a.post_process"]["path"] == str(path)
    assert copy_reward_files(rewards, tmp_path / "run") == {
        "a.post_process": tmp_path / "run" / "a.post_process_mine.py"
    }


def test_looking_for_a_source_imports_nothing() -> None:
    before = set(sys.modules)
    found = source_file("wsgiref.handlers:x")
    assert found is not None
    assert set(sys.modules) <= before | {"importlib.machinery"}


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("She sold 48 / 2 = 24, so 72.", "72"),
        ("It costs $1,234.50.", "1234.5"),
        ("a loss of -$5", "-5"),
        ("a loss of \N{MINUS SIGN}5", "-5"),
        ("50%", "50"),
        ("between 10-15", "15"),
        ("12,345,678 eggs", "12345678"),
        ("either 10,20", "20"),
        (".5", "0.5"),
        ("72.00", "72"),
        (r"\boxed{\$1,000}, which is more than 900", "1000"),
        (r"\boxed{x} is 7", "7"),
        (r"\boxed{1{,}234}", "1234"),
        (r"It is 10,\!000\,000.", "10000000"),
        ("#### 72 of all 100", "72"),
        ("#### ? So 5", "5"),
        ("<answer>7</answer> and 8", "7"),
        ("no idea", ""),
        ("9" * 400, "9" * 400),
    ],
)
def test_the_number_of_a_gsm8k_response_is_found(text: str, number: str) -> None:
    found = gsm8k(sample_of(text, "They did.\n#### 72")).info.get("answer")
    assert found == number


@pytest.mark.parametrize("answer", ["48/2 = 24\n48+24 = <<48+24=72>>72\n#### 72", "#### 72.00", 72, "72", "#### $72"])
def test_gsm8k_reads_the_answer_as_the_data_has_it(answer: Any) -> None:
    assert gsm8k(sample_of("The answer is 72.", answer)).score == 1.0
    assert gsm8k(sample_of("The answer is 7.", answer)).score == 0.0
    assert gsm8k(sample_of("I cannot say.", answer)).score == 0.0


@pytest.mark.parametrize(
    ("answer", "text", "exponent"),
    [
        (2e-05, "0.00002", "5"),
        (-1.5e-07, "-0.00000015", "7"),
        (1.2e16, "12000000000000000", "16"),
        (1e22, "1" + "0" * 22, "22"),
        (0.5, "0.5", "0"),
    ],
)
def test_a_float_of_the_data_is_compared_as_people_write_it(answer: float, text: str, exponent: str) -> None:
    right, wrong = sample_of(rf"\boxed{{{text}}}", answer), sample_of(rf"\boxed{{{exponent}}}", answer)
    for scorer in (exact_match, boxed, gsm8k):
        assert (scorer(right).score, scorer(wrong).score) == (1.0, 0.0), scorer.__name__
    assert canary(right.prompt, "It is {answer}.", ByteTokens()).text() == f"It is {text}."


@pytest.mark.parametrize("answer", [float("nan"), float("inf"), True, None, 7, [1e-05]])
def test_an_answer_that_is_not_a_finite_float_stays_as_python_writes_it(answer: Any) -> None:
    assert answer_text(answer) == str(answer)


def test_gsm8k_fails_by_name_where_the_data_has_no_number() -> None:
    with pytest.raises(RewardError, match=r"gsm8k reads the number after '####'.* prompt 'test/0' is '#### none'"):
        gsm8k(sample_of("72", "#### none"))


def test_the_source_of_a_function_in_namespace_packages_is_found_without_an_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "space_aa" / "bb" / "cc").mkdir(parents=True)
    (tmp_path / "space_aa" / "bb" / "cc" / "mod.py").write_text("def f(trajectory):\n    return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert source_file("space_aa.bb.cc.mod:f") == tmp_path / "space_aa" / "bb" / "cc" / "mod.py"
    assert source_file("space_aa.bb.none:f") is None
    assert source_file("space_aa.bb:f") is None
    assert not any(name.startswith("space_aa") for name in sys.modules)
