"""The log of a run: its file, the warnings on the terminal, and the error that ended the run."""

import logging
import threading
import traceback
from pathlib import Path

import pytest

from rlcore.config.providers import Provider
from rlcore.errors import CheckpointError, ChildError, ConfigError, PluginError, WorkerError, boundary
from rlcore.train.run_dir import LogFile, logging_to
from rlcore.train.signals import Stopped


def test_a_log_that_cannot_be_opened_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "log.txt").mkdir()
    with (
        pytest.raises(CheckpointError, match=r"log\.txt': records cannot be written: .*make room"),
        logging_to(tmp_path),
    ):
        pytest.fail("began")


def test_a_log_that_the_disk_does_not_take_ends_nothing_and_prints_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with logging_to(tmp_path):
        [handler] = [
            handler_of_root
            for handler_of_root in logging.getLogger("rlcore").handlers
            if isinstance(handler_of_root, LogFile)
        ]
        before = handler.setStream(Path("/dev/full").open("w"))  # noqa: SIM115  # the handler closes it
        assert before is not None
        before.close()
        logging.getLogger("rlcore.test").warning("what %s takes", "a stranger")
        logging.getLogger("rlcore.test").warning("nor this")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "within an application"])
def test_the_log_has_the_messages_of_plugins_and_the_terminal_their_warnings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [] if alone else [logging.NullHandler()])
    plugins = [Provider("judges", "rlcore-of-strangers", "1.0"), Provider("null", "rlcore", "1.0")]
    shown: list[str] = []
    with logging_to(tmp_path, plugins, shown.append):
        for name in ("judges.client", "rlcore_of_strangers.client", "rlcore.test", "another"):
            logging.getLogger(name).info("%s: a word", name)
            logging.getLogger(name).warning("%s: a warning", name)
    logging.getLogger("judges").warning("behind the run")
    lines = [line.split(": ", 1)[1] for line in (tmp_path / "log.txt").read_text().splitlines()]
    names = ("judges.client", "rlcore_of_strangers.client", "rlcore.test")
    assert lines == [f"{name}: {words}" for name in names for words in ("a word", "a warning")]
    warned = [f"{name}: a warning" for name in (*names[:2], "another")]
    assert capsys.readouterr().err.splitlines() == ([*warned, "behind the run"] if alone else [])
    assert shown == (["rlcore.test: a warning"] if alone else [])


def test_the_terminal_shows_a_warning_as_a_line_and_leaves_errors_to_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    shown: list[str] = []
    logger = logging.getLogger("rlcore.test")
    with logging_to(tmp_path, (), shown.append):
        logger.warning("reward 'mine' raised:\nTraceback\nKeyError: 'x'")
        logger.error("the run ended")
        logging.getLogger("rlcore.report.foreign_output").warning("standard error is gone")
    assert shown == ["reward 'mine' raised: KeyError: 'x' (log.txt has the traceback)"]
    assert "\nTraceback\n" in (tmp_path / "log.txt").read_text()


def _noted(error: Exception) -> Exception:
    error.add_note("see the docs")
    return error


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("1 validation error\n  score missing\nfor further information see a page"), "ValueError: 1 vali"),
        (_noted(KeyError("x")), "KeyError: 'x' ("),
        (ExceptionGroup("two", [OSError("down")]), "ExceptionGroup: two ("),
    ],
    ids=["a message of several lines", "a note", "a group"],
)
def test_the_warning_names_the_exception_of_a_traceback_that_does_not_end_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, line: str
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    shown: list[str] = []
    with pytest.raises(type(error)):
        raise error
    trace = "".join(traceback.format_exception(error))
    with logging_to(tmp_path, (), shown.append):
        logging.getLogger("rlcore.test").warning("it raised:\n%s", trace)
    [text] = shown
    assert text.startswith(f"it raised: {line}")


def test_a_thread_that_holds_the_terminal_may_log_while_another_awaits_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    terminal, held, awaited = threading.Lock(), threading.Event(), threading.Event()
    shown: list[str] = []

    def warn(text: str) -> None:
        if text == "first":
            awaited.set()
            terminal.acquire(timeout=10)  # forever, in a run
        shown.append(text)

    def lose_the_terminal() -> None:
        with terminal:
            held.set()
            awaited.wait(10)
            logging.getLogger("rlcore.drawing").warning("it is gone")

    with logging_to(tmp_path, (), warn):
        drawing = threading.Thread(target=lose_the_terminal, daemon=True)
        drawing.start()
        held.wait(10)
        logging.getLogger("rlcore.training").warning("first")
        drawing.join(10)
    assert shown == ["it is gone", "first"]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            ConfigError("data:\na line\x1b[2J"),
            "ERROR rlcore: the run ended by an error: data: a line�[2J\n",
        ),
        (KeyError("lost"), "Traceback"),
        (SystemExit(0), "Traceback"),
    ],
)
def test_the_log_says_which_error_ended_the_run(tmp_path: Path, error: BaseException, words: str) -> None:
    with pytest.raises(type(error)), logging_to(tmp_path):
        raise error
    log = (tmp_path / "log.txt").read_text()
    assert words in log
    assert "the run ended by an error" in log


def test_the_log_has_the_traceback_of_what_a_component_raised_also_in_another_process(tmp_path: Path) -> None:
    with pytest.raises(PluginError), logging_to(tmp_path), boundary("agent 'mine'", PluginError):
        raise KeyError("lost")
    assert 'test_run_log.py", line' in (tmp_path / "log.txt").read_text()
    error = WorkerError("actor[0].update(): KeyError: 'lost'")
    error.__cause__ = ChildError("KeyError", "Traceback of the worker")
    with pytest.raises(WorkerError), logging_to(tmp_path):
        raise WorkerError(f"{error}; last checkpoint") from error
    assert (tmp_path / "log.txt").read_text().endswith("Traceback of the worker\n")


def test_a_signal_that_ends_a_run_is_not_logged_as_an_error(tmp_path: Path) -> None:
    with pytest.raises(Stopped), logging_to(tmp_path):
        raise Stopped(15, "stopped by SIGTERM: saved")
    assert (tmp_path / "log.txt").read_text() == ""
