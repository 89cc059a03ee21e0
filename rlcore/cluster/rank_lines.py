"""Finds the ranks of a replica that hold up the others, by the line at which each one is."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from rlcore.cluster.stack import of_python

ANSWER_S = 2.0
"""Seconds that a process has to say where it is; one that is stopped or swapped out does not."""
MOST_NAMED = 4
IDLE = ("serve_calls", "without work")
"""The function of a process that waits for its next call, and the words for it; so does a thread that is only in the
standard library, such as the loop of an actor."""


class RankLine(NamedTuple):
    """A rank's process, and the line at which it is."""

    pid: int
    host: str
    line: str = ""
    """Such as 'in all_reduce at file.py:12'; empty: the process did not answer."""


def line_of(frames: Sequence[tuple[str, int, str]]) -> str:
    """The innermost frame outside Python's standard library, of frames of which the innermost is first."""
    theirs = [frame for frame in frames if not of_python(frame[0])]
    if not theirs:
        return IDLE[1]
    file, line, function = theirs[0]
    return IDLE[1] if function == IDLE[0] else f"in {function} at {file}:{line}"


def difference(ranks: Sequence[RankLine]) -> str:
    """The ranks that do not answer, or are at another line than most, with the line of the rest."""
    if len(ranks) == 1:
        only = ranks[0]
        return f"its process (pid {only.pid} on {only.host}) {_state(only.line)}"
    lines = Counter(rank.line for rank in ranks if rank.line)
    if len(lines) == 1 and "" not in {rank.line for rank in ranks}:
        return f"all {len(ranks)} ranks are {ranks[0].line}"
    (most, num), *_ = lines.most_common(1) or [("", 0)]
    shared = most if 2 * num > len(ranks) or num == len(ranks) - sum(not rank.line for rank in ranks) else ""
    named = [(number, rank) for number, rank in enumerate(ranks) if not shared or rank.line != shared]
    parts = [
        f"rank {number} of {len(ranks)} (pid {rank.pid} on {rank.host}) {_state(rank.line)}"
        for number, rank in named[:MOST_NAMED]
    ]
    parts += [f"{len(named) - MOST_NAMED} more differ"] if len(named) > MOST_NAMED else []
    return "; ".join(parts + ([f"the other ranks are {shared}"] if shared else []))


def _state(line: str) -> str:
    return f"is {line}" if line else "does not answer"
