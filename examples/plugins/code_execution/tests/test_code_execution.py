"""The reward keeps its contract, and programs that misbehave cost their tests, and nothing else."""

import time

import pytest
from rlcore_code_execution import output_of, passes_tests, program_of

from rlcore.testing import RewardFunctionSuite
from rlcore.testing.rewards import make_prompt, make_trajectory

TESTS = [{"input": "3 4\n", "output": "7\n"}, {"input": "1 1\n", "output": "2"}]
ADDS = "print(sum(map(int, input().split())))"


def score(response: str) -> float:
    return passes_tests(make_trajectory(make_prompt(0, tests=TESTS), text=response)).score


@pytest.mark.parametrize(
    ("response", "share"),
    [
        (f"So:\n```python\n{ADDS}\n```", 1.0),
        (ADDS, 1.0),
        ("```python\nprint(7)\n```", 0.5),
        ("```python\nraise SystemExit(0)\n```", 0.0),
        ("```python\nimport os; os._exit(0)\n```", 0.0),
        ("", 0.0),
    ],
)
def test_the_score_is_the_share_of_tests_that_pass(response: str, share: float) -> None:
    assert score(response) == share


def test_the_last_block_is_the_program() -> None:
    assert program_of("```python\na\n```\n```\nb\n```\nend") == "b\n"


@pytest.mark.parametrize(
    "program",
    ["while True: pass", "x = 'a' * (1 << 34)", "while True: print('a' * 100000)", "def f(): f()\nf()", "print(1"],
)
def test_a_program_beyond_a_limit_has_no_output(program: str) -> None:
    assert output_of(program, "", 0.5, 256) is None


@pytest.mark.slow
def test_memory_is_what_the_setting_says() -> None:
    program = "print(len(bytearray(300 << 20)))"
    assert (output_of(program, "", 10.0, 1024), output_of(program, "", 10.0, 256)) == ("314572800\n", None)


def test_what_a_program_starts_ends_with_it() -> None:
    program = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid)"
    printed = output_of(program, "", 5.0, 256)
    assert printed is not None
    for _ in range(100):
        if not _is_running(int(printed)):
            return
        time.sleep(0.02)
    pytest.fail("sleep is running")


def _is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_row_without_tests_is_an_error_of_the_data() -> None:
    with pytest.raises(ValueError, match="has no tests"):
        passes_tests(make_trajectory(make_prompt(0), text=ADDS))


class TestPassesTests(RewardFunctionSuite):
    target = "rlcore_code_execution:passes_tests"
    columns = {"tests": TESTS[:1]}
    known_good = (ADDS,)
    known_bad = ("print(8)", "seven")
