"""The last lines that a process printed, in the error about its end."""

import time

import pytest

from rlcore.cluster.worker_output import FRESH_S, WorkerOutput


def test_last_words_that_are_old_have_their_age(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    printed = WorkerOutput("critic[0]")
    assert printed.last_words == ""
    printed.add("loading")
    now_s += FRESH_S
    assert printed.last_words == "; its last words: loading"
    now_s += 60.0
    assert printed.last_words == f"; its last words, {FRESH_S + 60:.0f} s before: loading"
    printed.add("Killed")
    assert printed.last_words == "; its last words: loading | Killed"
