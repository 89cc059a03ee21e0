"""`os._exit` and `os.execv` of foreign code: refused below rlcore, reported elsewhere, and never a silent success."""

import os
import posix
from collections.abc import Callable
from typing import Any

import pytest

from rlcore.cli.endings import Endings
from rlcore.errors import EndOfProcess


class Ended(Exception):
    """Stands for the end of the process: nothing after the call runs."""


@pytest.fixture
def endings(monkeypatch: pytest.MonkeyPatch) -> Endings:
    """Installed over functions that raise what they were called with."""

    def system(name: str) -> Callable[..., Any]:
        def end(*arguments: Any) -> Any:
            raise Ended(name, *arguments)

        end.__module__ = "posix"
        return end

    for name in ("_exit", "execv", "execve"):
        for module in (os, posix):
            monkeypatch.setattr(module, name, system(name))
    made = Endings()
    made.install()
    return made


def code_in(module: str, line: str) -> Callable[[], Any]:
    """A function of that module which runs a line."""
    names: dict[str, Any] = {"__name__": module, "os": os, "posix": posix}
    exec(compile(f"def work():\n    {line}\n", f"/{module}.py", "exec"), names)
    return names["work"]  # type: ignore[no-any-return]


def below_rlcore(work: Callable[[], Any]) -> Any:
    names: dict[str, Any] = {"__name__": "rlcore.somewhere", "work": work}
    exec("def call():\n    return work()\n", names)
    return names["call"]()


CALLS = {
    "os._exit(0)": "os._exit(0)",
    "posix._exit(0)": "os._exit(0)",
    "os.execv('/bin/true', ['x'])": "os.execv('/bin/true', ['x'])",
    "posix.execve('/bin/true', ['x'], {})": "os.execve('/bin/true', ['x'], {})",
}


@pytest.mark.parametrize("line", CALLS)
def test_foreign_code_below_rlcore_cannot_end_the_process(endings: Endings, line: str) -> None:
    with pytest.raises(EndOfProcess) as caught:
        below_rlcore(code_in("theirs", line))
    assert caught.value.call == CALLS[line]


def test_rlcore_itself_ends_as_it_likes(endings: Endings) -> None:
    with pytest.raises(Ended) as caught:
        code_in("rlcore.cli", "os._exit(0)")()
    assert caught.value.args == ("_exit", 0)


def test_a_forked_child_ends_as_it_likes(endings: Endings) -> None:
    endings._pid = -1
    with pytest.raises(Ended) as caught:
        below_rlcore(code_in("theirs", "os._exit(0)"))
    assert caught.value.args == ("_exit", 0)


@pytest.mark.parametrize(
    ("line", "code"), [("os._exit(0)", 1), ("os._exit(256)", 1), ("os._exit(5)", 5), ("os.execv('/x', [])", 1)]
)
def test_a_thread_of_theirs_says_who_ended_the_process_and_not_with_0(
    endings: Endings, capsys: pytest.CaptureFixture[str], line: str, code: int
) -> None:
    with pytest.raises(Ended) as caught:
        code_in("theirs", line)()
    assert caught.value.args == ("_exit", code)
    assert capsys.readouterr().err == f"rlcore: thread 'MainThread', at /theirs.py:2, called {line}\n"


@pytest.mark.parametrize(
    ("known", "line", "code"), [(2, "os._exit(0)", 2), (0, "os._exit(0)", 0), (0, "os._exit(3)", 3)]
)
def test_once_the_command_has_its_code_that_stays(
    endings: Endings, capsys: pytest.CaptureFixture[str], known: int, line: str, code: int
) -> None:
    endings.code = known
    with pytest.raises(Ended) as caught:
        code_in("theirs", line)()
    assert caught.value.args == ("_exit", code)
    assert capsys.readouterr().err == ""
