"""Bytes that a service sends instead of an answer: one sample fails or is scored, and nothing else happens."""

import contextlib
import gzip
import itertools
import socket
import threading
import time
import tracemalloc
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest

from rlcore import RewardStatus
from rlcore.testing.rewards import make_trajectory

Score = Callable[..., Any]
Settings = Callable[..., Any]

OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
SCORE = b'{"score": 1}'


def whole(body: bytes, headers: bytes = b"") -> bytes:
    """An answer of one piece."""
    return OK + headers + b"Content-Length: %d\r\n\r\n" % len(body) + body


def slowly(text: bytes, pause_s: float = 0.05) -> Iterator[bytes]:
    """One byte after another."""
    for number in text:
        time.sleep(pause_s)
        yield bytes([number])


@cache
def bomb(wbits: int) -> bytes:
    """Packed zeros, 64 MiB of them."""
    packed = zlib.compressobj(1, wbits=wbits)
    zeros = bytes(1 << 20)
    return b"".join([*(packed.compress(zeros) for _ in range(64)), packed.flush()])


@contextmanager
def answering(pieces: Callable[[], Iterable[bytes]]) -> Iterator[tuple[str, list[bytes]]]:
    """A server that answers each request with these bytes and closes; (its address, the requests)."""
    listener = socket.create_server(("127.0.0.1", 0))
    requests: list[bytes] = []

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection, contextlib.suppress(OSError):
                    connection.settimeout(5)
                    requests.append(connection.recv(1 << 16))
                    for piece in pieces():
                        connection.sendall(piece)

    thread = threading.Thread(target=serve, name="raw answers")
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", requests
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(10)


FAILING: dict[str, Callable[[], Iterable[bytes]]] = {
    "nothing": lambda: [],
    "noise": lambda: [bytes(range(256)) * 100],
    "HTTP/0.9": lambda: [SCORE],
    "HTTP/9.9": lambda: [b"HTTP/9.9 200 OK\r\n\r\n" + SCORE],
    "a status of 10 digits": lambda: [b"HTTP/1.1 2000000000 OK\r\n\r\n"],
    "a negative status": lambda: [b"HTTP/1.1 -200 OK\r\n\r\n"],
    "endless headers": lambda: itertools.chain([OK], (b"X-%d: %s\r\n" % (n, b"y" * 1000) for n in range(20_000))),
    "an endless header": lambda: itertools.chain([OK + b"X: "], (b"y" * 65536 for _ in range(300))),
    "an endless status line": lambda: itertools.chain([b"HTTP/1.1 200 "], (b"y" * 65536 for _ in range(300))),
    "a flood of 1xx": lambda: (b"HTTP/1.1 100 Continue\r\n\r\n" * 1000 for _ in range(2000)),
    "a flood of early hints": lambda: (b"HTTP/1.1 103 Early\r\nLink: </x>\r\n\r\n" * 1000 for _ in range(2000)),
    "101": lambda: [b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n" + SCORE],
    "204": lambda: [b"HTTP/1.1 204 None\r\n\r\n"],
    "206": lambda: [whole(SCORE).replace(b"200 OK", b"206 Part")],
    "two lengths": lambda: [OK + b"Content-Length: 12\r\nContent-Length: 5\r\n\r\n" + SCORE],
    "a negative length": lambda: [OK + b"Content-Length: -1\r\n\r\n" + SCORE],
    "a length of 5000 digits": lambda: [OK + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n" + SCORE],
    "a length of 20 digits": lambda: [OK + b"Content-Length: " + b"9" * 20 + b"\r\n\r\n" + SCORE],
    "length and chunks": lambda: [OK + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\nc\r\n" + SCORE],
    "a chunk of 2^64 bytes": lambda: [CHUNKED + b"10000000000000000\r\n" + SCORE],
    "a negative chunk": lambda: [CHUNKED + b"-1\r\n" + SCORE],
    "a chunk's size that does not end": lambda: itertools.chain([CHUNKED], (b"0" * 65536 for _ in range(300))),
    "chunk extensions that do not end": lambda: itertools.chain(
        [CHUNKED + b"1;"], (b"x=y;" * 16384 for _ in range(99))
    ),
    "a stream without an end": lambda: itertools.chain(
        [CHUNKED], (b"1000\r\n" + b" " * 4096 + b"\r\n" for _ in range(2000))
    ),
    "trailers without an end": lambda: itertools.chain(
        [CHUNKED + b"c\r\n" + SCORE + b"\r\n0\r\n"], (b"X-%d: %s\r\n" % (n, b"y" * 1000) for n in range(20_000))
    ),
    "half a chunk": lambda: [CHUNKED + b"c\r\n" + SCORE[:5]],
    "gzip that is none": lambda: [whole(SCORE, b"Content-Encoding: gzip\r\n")],
    "half of gzip": lambda: [whole(gzip.compress(SCORE)[:14], b"Content-Encoding: gzip\r\n")],
    "a bomb of gzip": lambda: [whole(bomb(31), b"Content-Encoding: gzip\r\n")],
    "a bomb of deflate": lambda: [whole(bomb(15), b"Content-Encoding: deflate\r\n")],
    "brotli that is none": lambda: [whole(SCORE, b"Content-Encoding: br\r\n")],
    "zstd that is none": lambda: [whole(SCORE, b"Content-Encoding: zstd\r\n")],
    "gzip in gzip": lambda: [whole(gzip.compress(gzip.compress(SCORE)), b"Content-Encoding: gzip\r\n")],
    "a redirect to a file": lambda: [b"HTTP/1.1 302 F\r\nLocation: file:///etc/passwd\r\nContent-Length: 0\r\n\r\n"],
    "a redirect to itself": lambda: [b"HTTP/1.1 308 P\r\nLocation: /\r\nContent-Length: 0\r\n\r\n"],
    "a redirect to nowhere": lambda: [b"HTTP/1.1 301 M\r\nLocation: http://[::1\r\nContent-Length: 0\r\n\r\n"],
    "a type that is none": lambda: [whole(SCORE).replace(b"application/json", b";;;=\xff;")],
    "NUL in a header": lambda: [OK + b"X: a\0b\r\n\r\n" + SCORE],
    "a header without a name": lambda: [OK + b": x\r\n\r\n" + SCORE],
    "folded headers": lambda: [OK + b"X: a\r\n b\r\nContent-Length: x\r\n\r\n" + SCORE],
    "NaN": lambda: [whole(b'{"score": NaN}')],
    "1e400": lambda: [whole(b'{"score": 1e400}')],
    "-Infinity": lambda: [whole(b'{"score": -Infinity}')],
    "an integer of 5000 digits": lambda: [whole(b'{"score": ' + b"9" * 5000 + b"}")],
    "an integer of 4000 digits": lambda: [whole(b'{"score": ' + b"9" * 4000 + b"}")],
    "the second of two keys": lambda: [whole(b'{"score": 1, "score": "x"}')],
    "half a surrogate pair for an id": lambda: [whole(b'{"score": 1, "id": "\\ud800"}')],
    "halves of surrogate pairs in UTF-8": lambda: [whole(b'{"score": "\xed\xa0\x80"}')],
    "lists in lists": lambda: [whole(b"[" * 100_000 + b"]" * 100_000)],
    "two values": lambda: [whole(SCORE + SCORE)],
    "components of 5000 digits": lambda: [whole(b'{"score": 1, "components": {"a": ' + b"9" * 4000 + b"}}")],
    "a component without a number": lambda: [whole(b'{"score": 1, "components": {"a": NaN}}')],
    "an answer that comes too slowly": lambda: slowly(whole(SCORE)),
    "headers that come too slowly": lambda: itertools.chain([OK], slowly(b"X: y\r\n" * 20)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAILING)
def test_what_is_not_an_answer_fails_its_sample_in_one_line(
    name: str, score: Score, one_service: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    pieces = FAILING[name]
    began = time.monotonic()
    with answering(pieces) as (url, requests):
        settings = one_service(url, deadline_s=0.6, tries=1, token="tok-raw-0123456789")
        [only], _ = score(settings, [make_trajectory(0)])
    assert only.reward.status is RewardStatus.FAILED
    error = str(only.reward.info["error"])
    assert len(error.splitlines()) == 1
    assert len(error) < 1000
    assert "tok-raw" not in error
    assert len(requests) == 1
    assert time.monotonic() - began < 8
    assert not [record for record in caplog.records if record.exc_info]


SCORED: dict[str, bytes] = {
    "a transfer coding that does not exist": OK + b"Transfer-Encoding: x\r\n\r\n" + SCORE,
    "true": whole(b'{"score": true}'),
    "gzip without its sum": whole(gzip.compress(SCORE)[:-8], b"Content-Encoding: gzip\r\n"),
    "chunks with extensions and trailers": CHUNKED + b"c;a=b\r\n" + SCORE + b"\r\n0\r\nX-Score: 9\r\n\r\n",
    "a few of 1xx first": b"HTTP/1.1 100 Continue\r\n\r\n" * 3 + whole(SCORE),
    "gzip": whole(gzip.compress(SCORE), b"Content-Encoding: gzip\r\n"),
    "no length": OK + b"\r\n" + SCORE,
    "a mark of byte order": whole(b"\xef\xbb\xbf" + SCORE),
    "UTF-16": whole(SCORE.decode().encode("utf-16")),
    "UTF-32": whole(SCORE.decode().encode("utf-32")),
    "the second of two keys": whole(b'{"score": "x", "score": 1}'),
    "1e-400": whole(b'{"score": 1, "components": {"a": 1e-400}}'),
    "half a surrogate pair in info": whole(b'{"score": 1, "info": {"\\ud800": "\\udfff"}}'),
    "large numbers in info": whole(b'{"score": 1, "info": {"a": NaN, "b": 1e400, "c": ' + b"9" * 4000 + b"}}"),
    "bytes after the end": whole(SCORE) + b"HTTP/1.1 200 OK\r\n\r\n" * 1000,
}


@pytest.mark.parametrize("name", SCORED)
def test_what_is_an_answer_in_an_odd_form_is_taken(name: str, score: Score, one_service: Settings) -> None:
    with answering(lambda: [SCORED[name]]) as (url, _):
        [only], _ = score(one_service(url, deadline_s=5, tries=1), [make_trajectory(0)])
    assert (only.reward.status, only.reward.score) == (RewardStatus.OK, 1.0)


def test_a_bomb_is_not_unpacked_as_a_whole(score: Score, one_service: Settings) -> None:
    content = whole(bomb(31), b"Content-Encoding: gzip\r\n")
    with answering(lambda: [content]) as (url, _):
        tracemalloc.start()
        try:
            score(one_service(url, tries=1), [make_trajectory(0)])
            most_bytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert most_bytes < 32 << 20


def test_a_token_does_not_follow_a_redirect_to_another_host(score: Score, one_service: Settings) -> None:
    with (
        answering(lambda: [whole(SCORE)]) as (other, requests),
        answering(lambda: [b"HTTP/1.1 307 T\r\nLocation: " + other.encode() + b"/\r\nContent-Length: 0\r\n\r\n"]) as (
            url,
            _,
        ),
    ):
        [only], _ = score(one_service(url, tries=1, token="tok-raw-0123456789"), [make_trajectory(0)])
    assert only.reward.status is RewardStatus.FAILED
    assert not requests
