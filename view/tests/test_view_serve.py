"""The server: what it answers, what it refuses, and that it follows a run."""

import http.client
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from made_runs import write_rlcore_run
from rlcore_view import ViewError, read
from rlcore_view.serve import Editions, server_of


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_rlcore_run(tmp_path / "sums", steps=1)


@pytest.fixture
def address(run: Path) -> Iterator[str]:
    server, address = server_of(Editions([run], lambda: [read(run)], 100.0))
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield address
        server.shutdown()
        thread.join()


def ask(address: str, path: str | None = None, host: str | None = None, method: str = "GET") -> tuple[int, str, str]:
    """Status, policy and text of the answer."""
    parts = urlsplit(address)
    connection = http.client.HTTPConnection(parts.netloc, timeout=10)
    connection.request(method, parts.path if path is None else path, headers={"Host": host or parts.netloc})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, answer.getheader("Cache-Control") or "", text


def test_the_page_is_served_on_this_machine_under_a_word_that_cannot_be_guessed(address: str) -> None:
    server, _ = server_of(Editions([], list, 1.0))
    with server:
        assert server.server_address[0] == urlsplit(address).hostname == "127.0.0.1"
    assert len(urlsplit(address).path) >= 32
    status, cache, text = ask(address)
    assert (status, cache) == (200, "no-store")
    assert "connect-src 'self'" in text
    assert "async function follow()" in text


@pytest.mark.parametrize("path", ["/", "/wrong/", "/wrong/news", "//", "/%2e%2e/", "/../../etc/passwd"])
def test_without_the_word_there_is_nothing(address: str, path: str) -> None:
    assert ask(address, path)[::2] == (404, "not here")


@pytest.mark.parametrize(
    "more", ["../../../../etc/passwd", "config.yaml", "news/../config.yaml", "%2e%2e/config.yaml", "."]
)
def test_no_file_is_served(address: str, more: str) -> None:
    assert ask(address, urlsplit(address).path + more)[::2] == (404, "not here")


@pytest.mark.parametrize("host", ["attacker.example", "attacker.example:80", "127.0.0.1", "127.0.0.1.attacker.example"])
def test_a_request_for_another_host_is_refused(address: str, host: str) -> None:
    assert ask(address, host=host)[::2] == (403, "ask for 127.0.0.1")
    port = urlsplit(address).port
    assert ask(address, host=f"localhost:{port}")[0] == 200


def test_a_request_for_no_address_and_a_reader_that_leaves_print_no_traceback(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(address, "http://[/")[0] == 400
    parts = urlsplit(address)
    for _ in range(5):
        reader = socket.create_connection((parts.hostname, parts.port), timeout=10)
        reader.sendall(f"GET {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n".encode())
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        reader.close()  # by a reset
    assert ask(address)[0] == 200
    while any("process_request_thread" in thread.name for thread in threading.enumerate()):
        time.sleep(0.01)
    assert capsys.readouterr().err == ""


def test_nothing_can_be_sent(address: str) -> None:
    assert ask(address, method="POST")[0] == 501


def news(address: str, seen: str) -> dict[str, object] | None:
    status, _, text = ask(address, f"{urlsplit(address).path}news?seen={seen}")
    return json.loads(text) if status == 200 else None


def test_a_step_that_is_new_is_news_once(address: str, run: Path) -> None:
    first = news(address, "none")
    assert first is not None
    assert news(address, str(first["edition"])) is None
    (run / "trajectories" / "step_000002.jsonl").write_text((run / "trajectories" / "step_000001.jsonl").read_text())
    second = news(address, str(first["edition"]))
    assert second is not None
    assert second["names"] == ["about", "head-0", "events-0", "chunk-0-0", "chunk-0-1"]
    assert second["parts"].keys() == {"head-0", "chunk-0-0", "chunk-0-1"}  # type: ignore[attr-defined]
    assert news(address, str(second["edition"])) is None


@pytest.mark.slow
def test_news_are_the_parts_that_changed_and_all_of_them_for_a_reader_of_long_ago(tmp_path: Path) -> None:
    run = write_rlcore_run(tmp_path / "sums", steps=1, groups=150, size=4)
    editions = Editions([run], lambda: [read(run)], 100.0)
    first, _ = editions.newest()
    (run / "trajectories" / "step_000002.jsonl").write_text((run / "trajectories" / "step_000001.jsonl").read_text())
    found = json.loads(editions.news(first) or "")
    assert {"chunk-0-1", "chunk-0-2"} < {*found["names"]}
    assert {"chunk-0-1", "chunk-0-2"} & found["parts"].keys() == set()
    whole = json.loads(editions.news("long ago") or "")
    assert whole["parts"].keys() == {*found["names"]}
    assert whole["parts"] == {**whole["parts"], **found["parts"]}


def test_a_run_that_cannot_be_read_for_a_while_stays_with_the_reason(run: Path) -> None:
    editions = Editions([run], lambda: [read(run)], 100.0)
    editions.newest()
    (run / "metrics.jsonl").write_text("[1\n{}\n")
    _, [kept] = editions.newest()
    assert len(kept.samples) == 4
    assert "fix or remove the line" in kept.notes[-1]
    (run / "metrics.jsonl").write_text("[1\n{}\n{}\n")
    _, [again] = editions.newest()
    assert again.notes == kept.notes, "the reason is not repeated at each attempt"


def test_a_port_that_is_taken_is_named(address: str) -> None:
    port = urlsplit(address).port or 0
    with pytest.raises(ViewError, match=f"port {port}: Address already in use; choose another with --port"):
        server_of(Editions([], list, 1.0), port)


@pytest.mark.parametrize("port", [99999, -1])
def test_a_number_that_is_not_that_of_a_port_is_refused(port: int) -> None:
    with pytest.raises(ViewError, match=f"port {port}: a port is a number from 0 to 65535; choose another with --port"):
        server_of(Editions([], list, 1.0), port)


@pytest.mark.slow
def test_the_command_serves_a_run_without_samples_until_it_is_stopped(tmp_path: Path) -> None:
    empty = tmp_path / "new"
    (empty / "trajectories").mkdir(parents=True)
    command = [sys.executable, "-c", "from rlcore_view.cli import main; main()", str(empty), "--serve"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job ignores Ctrl-C
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.rstrip().endswith("; Ctrl-C ends it")
        assert ask(line.split()[0])[0] == 200
        process.send_signal(2)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.stdout.close()
        process.wait()
