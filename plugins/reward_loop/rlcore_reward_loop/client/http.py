"""One HTTP call, bounded in bytes, with every outcome sorted into three kinds."""

import asyncio
import json
import logging
import os
import resource
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp

from rlcore.contracts.foreign_json import TooManyValues, read_json
from rlcore.errors import describe
from rlcore.errors.redaction import begun_secret, clipped

logger = logging.getLogger(__name__)

OTHER_FILES = 512
"""File descriptors set aside for the rest of a run: children, logs, data, a cluster."""
LONGEST_QUOTE = 10_000
"""Leading bytes of an answer that are searched for secrets before an error quotes them."""
SHORTEST_HALF = 4
"""Characters at the end of an answer that count as the beginning of a secret; fewer are what many words begin with."""
LONGEST_ERROR = 300
"""Characters kept of an HTTP error."""
MAX_READING = 128 << 20
"""Total size of the answers being read at a time, over all services."""
REFUSAL_S = 1.0
"""Seconds allowed for reading the text of a refusal."""
REMEDIES = dict.fromkeys((401, 403), ": set the token of the service") | dict.fromkeys(
    (404, 405), ": correct the path in urls"
)
OVERLOADED = frozenset({429, 502, 503, 504, 529})


class NoAnswer(Exception):
    """The service gave no usable answer; the message says why."""


class WrongAddress(NoAnswer):
    """The address gives no call a usable answer, by the kind of its answer; another address may."""


class Unavailable(NoAnswer):
    """The service may answer a retry."""

    def __init__(self, why: str, retry_after_s: float | None = None, overloaded: bool = False) -> None:
        super().__init__(why)
        self.retry_after_s = retry_after_s
        self.overloaded = overloaded


class Reading:
    """The bytes of all answers being read at a time. The services' limits bound the number of calls, not this."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Count an answer's bytes while it is read. NoAnswer when the total is too large."""
        self.num_bytes += num_bytes
        if self.num_bytes > MAX_READING:
            raise NoAnswer(
                f"answered while answers of {MAX_READING >> 20} MiB were being read; choose a lower "
                "max_response_bytes or concurrency"
            )


_READING = Reading()


class Client:
    """Posts JSON and returns JSON; `token` goes with every call."""

    def __init__(self, token: str = "") -> None:
        self._headers = {"Content-Type": "application/json"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Open the pool of connections; nothing is sent yet."""
        # Unlimited here: each service enforces slots and deadlines.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=60),
            timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=self._headers,
        )

    async def close(self) -> None:
        """Close the connections. Safe to call more than once."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def post(self, url: str, body: bytes, max_bytes: int) -> tuple[Any, bytes]:
        """The answer, parsed and as raw bytes.

        Unavailable for passing failures, WrongAddress for lasting ones of the address, NoAnswer for those of the call.
        """
        if self._session is None:
            raise NoAnswer("the manager was not started, or is closed")
        try:
            # A redirect could lead the token to another host.
            async with self._session.post(url, data=body, allow_redirects=False) as response:
                if response.status != 200:
                    raise _refusal(response, await _beginning(response))
                content = await _read(response, max_bytes)
                kind = response.content_type if response.headers.get("Content-Type", "").strip() else ""
        except aiohttp.ClientResponseError as cause:
            raise WrongAddress(f"answered with something other than HTTP ({_redacted(cause)})") from cause
        except aiohttp.ClientConnectorError as cause:
            number, words = cause.os_error.errno or 0, cause.os_error.strerror
            why = os.strerror(number) if number > 0 else words  # resolvers have numbers below 0
            raise Unavailable(f"could not be reached ({type(cause).__name__}: {why}; does it run there?)") from cause
        except (aiohttp.ClientError, OSError) as cause:
            raise Unavailable(f"could not be reached ({_redacted(cause)})") from cause
        except UnicodeError as cause:  # from Python's host name codec, e.g. for a label of 64 characters
            raise WrongAddress(f"could not be reached ({_redacted(cause)}): correct the host in urls") from cause
        if not kind:
            raise WrongAddress(
                f"answered without Content-Type, {_quoted(content)}; needs Content-Type: application/json"
            )
        if "json" not in kind:
            raise WrongAddress(f"answered with {kind}, {_quoted(content)}; needs JSON")
        try:
            return read_json(content), content
        except TooManyValues as cause:
            raise NoAnswer(f"answered with {_quoted(content)}, {cause}; needs fewer") from cause
        except ValueError as cause:
            raise NoAnswer(f"answered with {_quoted(content)}; needs JSON") from cause


def _redacted(cause: Exception) -> str:
    """The error, cut and without secrets: HTTP errors quote what the service sent."""
    return clipped(describe(cause), LONGEST_ERROR)


def _quoted(content: bytes | bytearray) -> str:
    """The beginning of an answer, without a secret at its end that the service or the connection has cut."""
    text = content[:LONGEST_QUOTE].decode(errors="replace")
    begun = begun_secret(text)
    return repr(clipped(text[: len(text) - begun] if begun >= SHORTEST_HALF else text, 40))


async def _beginning(response: aiohttp.ClientResponse) -> str:
    """The first words of a refusal, quoted, after a comma; empty if there are none or they arrive too late."""
    content = bytearray()
    with suppress(TimeoutError, aiohttp.ClientError):
        async with asyncio.timeout(REFUSAL_S):
            while len(content) < LONGEST_QUOTE and (chunk := await response.content.read(LONGEST_QUOTE)):
                content += chunk
    return f", {_quoted(content)}" if content.strip() else ""


def _refusal(response: aiohttp.ClientResponse, words: str) -> NoAnswer:
    status = response.status
    if status == 429 or status >= 500:
        pause_s = seconds(response.headers.get("Retry-After", ""))
        return Unavailable(f"answered {status}{words}", pause_s, status in OVERLOADED)
    if 300 <= status < 400:
        place = clipped(response.headers.get("Location", ""), LONGEST_ERROR)
        return WrongAddress(
            f"answered {status}, a redirect to {place!r}, which is not followed; name that address in urls"
        )
    kind = WrongAddress if status in REMEDIES else NoAnswer
    return kind(f"answered {status}{words}; needs 200{REMEDIES.get(status, '')}")


def allow_connections(number: int) -> None:
    """Raise this process's limit on open files (often 1024) to fit `number` connections; warn if it cannot."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = number + OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < needed:
        logger.warning(
            "reward_loop: services may have %d calls at a time, for which this process needs %d open files and may "
            "have %d; needs a higher `ulimit -Hn` or a lower plugins.reward_loop.services.<name>.concurrency",
            number,
            needed,
            hard,
        )


async def _read(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    content = bytearray()
    announced = response.content_length or 0
    # Short answers are read in one go; a compressed one may unpack to something long.
    whole = "Content-Encoding" not in response.headers and 0 < announced <= max_bytes
    try:
        if whole:
            _READING.add(announced)
            return await response.read()
        async for chunk in response.content.iter_any():
            content += chunk
            _READING.add(len(chunk))
            if len(content) > max_bytes:
                raise NoAnswer(f"answered with more than max_response_bytes={max_bytes}")
    except (aiohttp.ClientError, OSError) as cause:
        raise WrongAddress(f"broke off ({_redacted(cause)})") from cause
    finally:
        _READING.num_bytes -= announced if whole else len(content)
    return bytes(content)


def seconds(retry_after: str) -> float | None:
    """The header Retry-After, a number or a date, as seconds from now; None if there is none."""
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        pass
    try:
        date = parsedate_to_datetime(retry_after)
        date = date if date.tzinfo else date.replace(tzinfo=UTC)  # a date with "-0000"
        return max(0.0, date.timestamp() - time.time())
    except (ValueError, TypeError, OverflowError, OSError):  # the last two: years out of range
        return None


def plain(value: Any) -> Any:
    """JSON for types that `json` lacks: mappings, numpy scalars and arrays; `str` of anything else."""
    if isinstance(value, Mapping):
        return dict(value.items())
    return value.tolist() if hasattr(value, "tolist") else str(value)


ENCODER = json.JSONEncoder(default=plain)
"""Built once: `json.dumps` with a `default` builds an encoder per call."""
