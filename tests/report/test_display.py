"""Foreign text reaches terminal and log without secrets, escape sequences or markup."""

import asyncio
import base64
import contextlib
import html
import io
import json
import logging
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from urllib.parse import quote, quote_plus

import pytest
from rich.console import Console

from rlcore.cli.arguments import Parser
from rlcore.cli.console import table
from rlcore.cluster.streams import MAX_REST, lines
from rlcore.cluster.worker_output import MAX_LINE, WorkerOutput
from rlcore.config import load_config
from rlcore.errors.redaction import DisplayFormatter, displayable, remember_variable
from rlcore.report import foreign_output, metrics
from rlcore.report.terminal import Terminal
from rlcore.testing import write_prompts
from rlcore.testing.null import SETTINGS

ROOT = Path(__file__).parent.parent.parent
HOSTILE = "\x1b[31mred\x1b]0;title\x07 [/bold] [link=x] \u202eright\u2066 \ud800 tab\there"


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> str:
    """A value that the configuration read from the environment."""
    monkeypatch.setenv("RLCORE_TEST_TOKEN", "s3cr3t-s3cr3t-s3cr3t")
    remember_variable("RLCORE_TEST_TOKEN")
    return "s3cr3t-s3cr3t-s3cr3t"


def assert_harmless(text: str, secret: str) -> None:
    assert not any(letter in text for letter in ("\x1b", "\x07", "\u202e", "\u2066", "\ud800"))
    assert secret not in text
    assert "[/bold] [link=x]" in text


def test_control_characters_are_replaced_and_letters_of_all_scripts_stay(secret: str) -> None:
    assert_harmless(displayable(f"{HOSTILE} {secret}"), secret)
    kept = "zażółć 漢字\u3000かな العربية\n\tπ ≤ 3\u00a0€"
    assert displayable(kept) == kept


def test_everything_on_the_terminal_of_a_run_is_harmless(secret: str) -> None:
    for is_terminal in (False, True):
        out = io.StringIO()
        terminal = Terminal(Console(file=out, force_terminal=is_terminal, color_system=None, width=400))
        text = f"{HOSTILE} {secret}"
        terminal.say(text)
        terminal.warn(text)
        with terminal.showing():
            terminal.begin(3, 0)
            terminal.phase(text)
        for line in out.getvalue().splitlines():
            shown = line.replace("\x1b[?25l", "").replace("\x1b[?25h", "").replace("\x1b[2K", "")
            if "red" in shown:
                assert_harmless(shown, secret)
        assert out.getvalue().count("[/bold] [link=x]") >= 2


def test_titles_and_cells_of_tables_are_harmless(secret: str) -> None:
    out = io.StringIO()
    text = f"{HOSTILE} {secret}"
    Console(file=out, width=400).print(table(text, (text,), [(text,)]))
    assert out.getvalue().count("[/bold] [link=x]") == 3
    assert_harmless(out.getvalue(), secret)


def test_errors_about_arguments_are_harmless(secret: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        Parser("plan", "").parse([f"--unknown={HOSTILE} {secret}"])
    assert_harmless(capsys.readouterr().err, secret)


def test_the_log_is_harmless(secret: str) -> None:
    record = logging.LogRecord("rlcore", logging.INFO, "", 0, "said %s", (f"{HOSTILE} {secret}",), None)
    assert_harmless(DisplayFormatter().format(record), secret)


def in_base64(value: str, before: str) -> str:
    """The value inside something longer, as in a header of basic authentication."""
    return base64.b64encode(f"{before}{value}:x".encode()).decode()


@pytest.mark.parametrize(
    "write",
    [
        str, repr, ascii, json.dumps, lambda value: json.dumps(json.dumps(value)), quote, quote_plus,
        lambda value: quote(value, safe=""), lambda value: repr(value.encode()),
        lambda value: json.dumps(value).replace("/", "\\/"), lambda value: value.replace("/", "\\/"),
        lambda value: base64.b64encode(value.encode()).decode(),
        lambda value: base64.urlsafe_b64encode(value.encode()).decode(),
        *(partial(in_base64, before=before) for before in ("", "u:", "user:", "a-user:")),
        html.escape, lambda value: value.encode().hex(), lambda value: value.encode().hex().upper(),
        lambda value: re.sub("%..", lambda found: found.group().lower(), quote(value, safe="")),
    ],
)  # fmt: skip
def test_a_secret_is_redacted_however_it_is_written(
    write: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    value = 's3cr3t/+"=%é-token?>'
    monkeypatch.setenv("RLCORE_TEST_TOKEN", value)
    remember_variable("RLCORE_TEST_TOKEN")
    shown = displayable(f"said {write(value)}.")
    assert "s3cr3t" not in shown
    for encoded in ("czNjcjN0", in_base64("s3cr3t", "u:")[4:-4], in_base64("s3cr3t", "user:")[8:-4], b"s3cr3t".hex()):
        assert encoded.lower() not in shown.lower()
    assert "${oc.env:RLCORE_TEST_TOKEN}" in shown


def test_each_line_of_a_secret_of_several_is_redacted(monkeypatch: pytest.MonkeyPatch) -> None:
    key = '-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkqhki/9w0B\nAQEFAASCBKcwggSjAgEA"\n-----END PRIVATE KEY-----\n'
    monkeypatch.setenv("RLCORE_TEST_PEM", key)
    remember_variable("RLCORE_TEST_PEM")
    for line in key.splitlines():
        for written in (line, f"  {line}\r", json.dumps(line)):
            assert "${oc.env:RLCORE_TEST_PEM}" in displayable(written)
            assert line not in displayable(written)


@pytest.mark.parametrize("cut", range(1, 20))
def test_a_secret_across_the_end_of_an_unfinished_line_is_redacted(secret: str, cut: int) -> None:
    shown = io.StringIO()
    output = foreign_output.ForeignOutput(shown)
    output.write("x" * foreign_output.LONGEST_LINE + secret[:cut])
    output.write(secret[cut:] + "y\n")
    assert shown.getvalue().replace("x", "") == "\n${oc.env:RLCORE_TEST_TOKEN}y\n"


@pytest.mark.parametrize("cut", [1, 10, 19])
def test_a_line_that_is_cut_at_its_beginning_holds_no_half_of_a_secret(secret: str, cut: int) -> None:
    async def found() -> list[str]:
        reader = asyncio.StreamReader()
        reader.feed_data(b"x" * (MAX_REST - cut) + f"{secret}é".encode() + b"y" * (MAX_REST - 22 + cut))
        reader.feed_data(b"z\n")
        reader.feed_eof()
        return [line async for line in lines(reader)]

    [line] = asyncio.run(found())
    assert line.endswith("yz")
    assert secret[-1] not in line.replace("${oc.env:RLCORE_TEST_TOKEN}", "").strip("é\ufffd")


def test_variables_that_are_named_like_secrets_are_redacted_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = {"MY_API_KEY": "canary-1234", "HF_TOKEN": "canary-2345", "pgpassword_db": "canary-3456"}
    plain = {"TOKENIZERS_PARALLELISM": "canary-4567", "KEYBOARD": "canary-5678", "SSH_AUTH_SOCK": "/canary-6789"}
    for name, value in {**secret, **plain, "SHORT_KEY": "true", "KEY_FILE": "/canary-7890"}.items():
        monkeypatch.setenv(name, value)
    load_config([], list(SETTINGS), [])
    assert "canary" not in displayable(" ".join(secret.values()))
    for value in (*plain.values(), "true", "/canary-7890"):
        assert displayable(value) == value


def test_a_secret_that_a_cut_would_halve_is_redacted(secret: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "rlcore"):
        printed = WorkerOutput("child")
        printed.add("x" * (MAX_LINE - 10) + secret)
    assert secret[:8] not in caplog.text
    assert secret[:8] not in printed.last_words


REWARD = """import os, sys
async def loud(trajectory, unused=""):
    print(os.environ["HOSTILE"], os.environ["RLCORE_TEST_TOKEN"])
    print(os.environ["HOSTILE"], os.environ["RLCORE_TEST_TOKEN"], file=sys.stderr)
    return 1.0
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "is_terminal", [pytest.param(False, marks=pytest.mark.fault), True], ids=["a pipe", "a terminal"]
)
def test_what_an_async_reward_prints_is_harmless(is_terminal: bool, tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text(REWARD)
    run = command(
        tmp_path, "train.max_steps=2", "reward.functions.all.fn=loud.py:loud",
        "reward.functions.all.kwargs={unused: '${oc.env:RLCORE_TEST_TOKEN}'}",
    )  # fmt: skip
    hostile = HOSTILE.replace("\ud800", "")
    environment = {**os.environ, "HOSTILE": hostile, "RLCORE_TEST_TOKEN": "s3cr3t-s3cr3t", "PYTHONPATH": str(tmp_path)}
    ours, theirs = pty.openpty()
    output: int = theirs if is_terminal else subprocess.PIPE
    process = subprocess.Popen(run, stdin=theirs, stdout=output, stderr=output, cwd=tmp_path, env=environment)
    os.close(theirs)
    if is_terminal:
        shown = b""
        with contextlib.suppress(OSError):  # the end of a pseudo terminal
            while chunk := os.read(ours, 65536):
                shown += chunk
        assert process.wait(100) == 0
    else:
        shown = b"".join(process.communicate(timeout=100))
    os.close(ours)
    assert process.returncode == 0, shown
    assert shown.count(b"[/bold] [link=x]") >= 4
    for foreign in (b"\x1b]0;title", b"\x1b[31mred", b"\x07", "\u202e".encode(), b"s3cr3t-s3cr3t"):
        assert foreign not in shown


def command(tmp_path: Path, *more: str) -> list[str]:
    """A null run of 30 steps."""
    prompts = write_prompts(tmp_path / "prompts.jsonl", 64)
    settings = [*SETTINGS, f"data.sources.all.path={prompts}", "train.name=run", "train.max_steps=30", *more]
    return [sys.executable, "-m", "rlcore", "train", *settings, "--plugin", "null"]


def assert_trained_to_its_end(run_dir: Path) -> None:
    assert [row["step"] for row in metrics.read(run_dir)] == list(range(1, 31))
    assert (run_dir / "checkpoints" / "step_30" / "manifest.json").exists()
    log = (run_dir / "log.txt").read_text()
    assert log.count("nothing more is shown; training continues") == 1


@pytest.mark.slow
@pytest.mark.parametrize("also_errors", [False, pytest.param(True, marks=pytest.mark.fault)])
def test_training_outlives_the_reader_of_its_output(tmp_path: Path, also_errors: bool) -> None:
    errors = subprocess.STDOUT if also_errors else subprocess.PIPE
    process = subprocess.Popen(command(tmp_path), stdout=subprocess.PIPE, stderr=errors, cwd=tmp_path)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    if process.stderr:
        with process.stderr:
            assert process.stderr.read() == b""
    assert process.wait(timeout=100) == 0
    assert_trained_to_its_end(tmp_path / "runs" / "run")


@pytest.mark.fault
def test_training_outlives_its_terminal(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", "import fcntl, os, sys, termios\nfcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
         "os.execv(sys.argv[1], sys.argv[1:])", *command(tmp_path, "plugins.null.update_s=0.02")],
        stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, cwd=tmp_path,
    )  # fmt: skip
    os.close(theirs)
    log = tmp_path / "runs" / "run" / "metrics.jsonl"
    until = time.monotonic() + 60
    while not (log.exists() and log.stat().st_size) and time.monotonic() < until:
        time.sleep(0.02)
        os.read(ours, 65536)
    os.close(ours)  # the kernel sends SIGHUP to the session
    assert process.wait(timeout=100) == 0
    assert_trained_to_its_end(tmp_path / "runs" / "run")
    assert "the terminal has gone" in (tmp_path / "runs" / "run" / "log.txt").read_text()


@pytest.mark.fault
def test_nohup_stays_nohup(tmp_path: Path) -> None:
    code = "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    run = command(tmp_path, "plugins.null.update_s=0.02")
    process = subprocess.Popen([sys.executable, "-c", code, *run], stdout=subprocess.DEVNULL, cwd=tmp_path)
    log = tmp_path / "runs" / "run" / "metrics.jsonl"
    until = time.monotonic() + 60
    while not (log.exists() and log.stat().st_size) and time.monotonic() < until:
        time.sleep(0.02)
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=100) == 0
