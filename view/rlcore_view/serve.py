"""Serves the page on this machine only, and newer editions of it while the run continues.

The address contains a random word, so no other page and no other user of the machine can guess it. Requests for another
host are refused, so DNS rebinding to 127.0.0.1 reads nothing. No file is served from the disk.
"""

import hashlib
import hmac
import json
import os
import secrets
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from rlcore_view.model import Run, ViewError
from rlcore_view.write_page import PackedChunks, page_of, parts

_SKIPPED = frozenset({"checkpoints", "rewards", "logs", ".git"})
_DEEPEST = 4
EDITIONS = 20
"""Recent editions for which a reader still gets only the changes."""
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


class Editions:
    """Runs from the disk, read again when a file has changed."""

    def __init__(self, paths: Sequence[Path], read: Callable[[], list[Run]], max_mb: float) -> None:
        self._paths, self._read, self._max_mb = paths, read, max_mb
        self._lock = threading.RLock()
        self._chunks = PackedChunks()
        self._edition = ""
        self._runs = list[Run]()
        self._read_last: Sequence[Run] = ()
        """Without the reason why they could not be read since."""
        self._parts: Mapping[str, str] = {}
        self._digests: dict[str, Mapping[str, bytes]] = {}
        """Digests of the parts of recent editions, by edition, to find what has changed since."""

    def newest(self) -> tuple[str, list[Run]]:
        """The edition's name and its runs. A run that cannot be read now is shown as before, with the reason."""
        with self._lock:
            edition = (
                secrets.token_hex(4) if (seen := _fingerprint(self._paths)) != self._edition.split("@")[-1] else ""
            )
            if edition:
                try:
                    self._runs = self._read_last = self._read()
                except ViewError as error:
                    self._runs = [replace(run, notes=[*run.notes, str(error)]) for run in self._read_last]
                self._edition = f"{edition}@{seen}"
                self._parts = parts(self._runs, self._max_mb, self._chunks)
                digests = {name: hashlib.sha256(packed.encode()).digest() for name, packed in self._parts.items()}
                kept = list(self._digests.items())[1 - EDITIONS :]
                self._digests = {**dict(kept), self._edition: digests}
            return self._edition, self._runs

    def page(self) -> str:
        """The newest edition as a page."""
        with self._lock:
            edition, runs = self.newest()
            return page_of(runs, self._parts, edition)

    def news(self, seen: str) -> str | None:
        """The changes since the `seen` edition, as JSON; None if it is the newest.

        `names` lists all parts of the newest edition. `parts` has those that differ from the seen edition, or all of
        them if that one is too old.
        """
        with self._lock:
            edition, _ = self.newest()
            if edition == seen:
                return None
            new, before = self._digests[edition], self._digests.get(seen, {})
            changed = {name: packed for name, packed in self._parts.items() if new[name] != before.get(name)}
        return json.dumps({"edition": edition, "names": [*new], "parts": changed})


def _fingerprint(paths: Sequence[Path]) -> str:
    """A text that changes when a file of the runs changes."""
    return str(hash(tuple(entry for path in paths for entry in _entries(path, _DEEPEST))))


def _entries(path: Path, depth: int) -> Iterator[tuple[str, int, int]]:
    try:
        if path.is_file():
            found = path.stat()
            yield str(path), found.st_size, found.st_mtime_ns
            return
        with os.scandir(path) as entries:
            inner = sorted(entry.name for entry in entries)
    except OSError:
        return
    for name in inner:
        if depth and name not in _SKIPPED:
            yield from _entries(path / name, depth - 1)


class _Server(ThreadingHTTPServer):
    """Serves each connection in a thread that does not outlive the command."""

    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing about a reader that leaves in the middle of an answer; see `BaseServer.handle_error`."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


def server_of(editions: Editions, port: int = 0) -> tuple[ThreadingHTTPServer, str]:
    """A server on 127.0.0.1, not yet serving, and the address of its page; port 0 picks a free port."""
    word, hosts = secrets.token_urlsafe(24), set[str]()
    try:
        server = _Server(("127.0.0.1", port), _handler(editions, word, hosts))
    except OverflowError as error:
        raise ViewError(f"port {port}: a port is a number from 0 to 65535; choose another with --port") from error
    except OSError as error:
        raise ViewError(f"port {port}: {error.strerror or error}; choose another with --port") from error
    hosts.update((f"127.0.0.1:{server.server_port}", f"localhost:{server.server_port}"))
    return server, f"http://127.0.0.1:{server.server_port}/{word}/"


def _handler(editions: Editions, word: str, hosts: Set[str]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """Answers the two addresses that contain the word."""

        timeout = 30
        server_version, sys_version = "rlcore-view", ""

        def do_GET(self) -> None:
            try:
                address = urlsplit(self.path)
            except ValueError:  # such as the address http://[/
                self._answer(HTTPStatus.BAD_REQUEST, "text/plain", "not an address")
                return
            prefix, slash, rest = address.path.removeprefix("/").partition("/")
            if self.headers.get("Host") not in hosts:
                self._answer(HTTPStatus.FORBIDDEN, "text/plain", "ask for 127.0.0.1")
            elif not hmac.compare_digest(prefix.encode(), word.encode()):
                self._answer(HTTPStatus.NOT_FOUND, "text/plain", "not here")
            elif slash and not rest:
                self._answer(HTTPStatus.OK, "text/html", editions.page())
            elif rest == "news":
                news = editions.news(parse_qs(address.query).get("seen", [""])[0])
                status = HTTPStatus.NO_CONTENT if news is None else HTTPStatus.OK
                self._answer(status, "application/json", news or "")
            else:
                self._answer(HTTPStatus.NOT_FOUND, "text/plain", "not here")

        def _answer(self, status: HTTPStatus, kind: str, text: str) -> None:
            data = text.encode()
            self.send_response(status)
            for name, value in _HEADERS.items():
                self.send_header(name, value)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            if status is not HTTPStatus.NO_CONTENT:
                self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            """Does nothing: the addresses of requests contain the secret word."""

    return Handler
