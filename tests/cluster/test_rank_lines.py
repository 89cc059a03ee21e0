"""The ranks that hold up the others are named by the line at which each one is."""

import pytest

from rlcore.cluster.rank_lines import RankLine, difference, line_of


def ranks(*lines: str) -> list[RankLine]:
    return [RankLine(100 + number, "node", line) for number, line in enumerate(lines)]


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (("",), "its process (pid 100 on node) does not answer"),
        (("in f at x:1",), "its process (pid 100 on node) is in f at x:1"),
        (("in f at x:1",) * 3, "all 3 ranks are in f at x:1"),
        (("in f at x:1", ""), "rank 1 of 2 (pid 101 on node) does not answer; the other ranks are in f at x:1"),
        (("a", "a", "b", "a"), "rank 2 of 4 (pid 102 on node) is b; the other ranks are a"),
        (("a", "b"), "rank 0 of 2 (pid 100 on node) is a; rank 1 of 2 (pid 101 on node) is b"),
        (("", ""), "rank 0 of 2 (pid 100 on node) does not answer; rank 1 of 2 (pid 101 on node) does not answer"),
    ],
)
def test_ranks_that_differ_are_named(lines: tuple[str, ...], found: str) -> None:
    assert difference(ranks(*lines)) == found


def test_a_report_is_bounded() -> None:
    text = difference(ranks(*("",) * 60, *("a",) * 4))
    assert text.count("does not answer") == 4
    assert text.endswith("; 56 more differ; the other ranks are a")


def test_a_line_is_the_innermost_outside_pythons_library() -> None:
    own = ("/x/mine.py", 3, "step")
    assert line_of([(threading_file(), 9, "wait"), own]) == "in step at /x/mine.py:3"
    assert line_of([("/x/serve.py", 3, "serve_calls")]) == "without work"
    assert line_of([(threading_file(), 9, "run"), ("<frozen runpy>", 3, "f")]) == "without work", "an actor's loop"


def threading_file() -> str:
    import threading

    return str(threading.__file__)
