"""The client of a scoring service: one call is bounded in time, tries, bytes and company."""

import asyncio
import json
import random
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp

from rlcore.errors import describe
from rlcore.types import Lane
from rlcore_reward_loop.settings import RewardLoopSettings

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 10.0


class NoAnswer(Exception):
    """The service gave no usable answer; the message says why."""


class Unavailable(NoAnswer):
    """It may answer when asked again."""

    def __init__(self, why: str, retry_after_s: float | None = None) -> None:
        super().__init__(why)
        self.retry_after_s = retry_after_s


class ScoringService:
    """Posts JSON and returns JSON."""

    def __init__(self, settings: RewardLoopSettings) -> None:
        self._settings = settings
        self._slots = {lane: asyncio.Semaphore(settings.concurrency) for lane in Lane}
        self._session: aiohttp.ClientSession | None = None
        self.num_retries = 0

    async def start(self) -> None:
        """Open the pool of connections; nothing is sent yet."""
        headers = {"Content-Type": "application/json"}
        if self._settings.token:
            headers["Authorization"] = f"Bearer {self._settings.token}"
        # No limits of its own: slots and deadline are ours.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None), headers=headers
        )

    async def close(self) -> None:
        """Close the connections; also more than once."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def ask(self, question: Mapping[str, Any], lane: Lane) -> Any:
        """The service's answer, parsed; NoAnswer when the tries are used up or the deadline has passed.

        The deadline's clock starts when the lane has a free slot, so that a long queue fails nobody.
        """
        body = json.dumps(question, default=plain).encode()
        last = ""
        async with self._slots[lane]:
            try:
                async with asyncio.timeout(self._settings.deadline_s):
                    for tried in range(1, self._settings.tries + 1):
                        try:
                            return await self._post(body)
                        except Unavailable as cause:
                            last = str(cause)
                            if tried < self._settings.tries:
                                self.num_retries += 1
                                await asyncio.sleep(pause_s(tried, cause.retry_after_s))
            except TimeoutError:
                also = f", before which it {last}" if last else ""
                raise NoAnswer(f"no answer within deadline_s={self._settings.deadline_s:g}{also}") from None
        raise NoAnswer(f"{last} in the last of {self._settings.tries} tries")

    async def _post(self, body: bytes) -> Any:
        if self._session is None:
            raise NoAnswer("the manager was not started, or is closed")
        try:
            # A redirect could lead the token to another host.
            async with self._session.post(self._settings.url, data=body, allow_redirects=False) as response:
                if response.status == 429 or response.status >= 500:
                    raise Unavailable(f"answered {response.status}", seconds(response.headers.get("Retry-After", "")))
                if response.status != 200:
                    raise NoAnswer(f"answered {response.status}; 200 is needed")
                content = await self._read(response)
        except aiohttp.ClientConnectorError as cause:
            raise Unavailable(f"could not be reached ({describe(cause)})") from cause
        except aiohttp.ClientError as cause:
            raise NoAnswer(f"broke off ({describe(cause)})") from cause
        try:
            return json.loads(content)
        except ValueError as cause:
            raise NoAnswer(f"answered with {content[:40]!r}; JSON is needed") from cause

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        content = bytearray()
        async for chunk in response.content.iter_chunked(1 << 16):
            content += chunk
            if len(content) > self._settings.max_response_bytes:
                raise NoAnswer(f"answered with more than max_response_bytes={self._settings.max_response_bytes}")
        return bytes(content)


def pause_s(tried: int, retry_after_s: float | None) -> float:
    """Seconds until the next try: what the service asks for, else twice as long each time, with jitter."""
    if retry_after_s is not None:
        return retry_after_s
    return float(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (tried - 1)) * random.uniform(0.5, 1.0))


def seconds(retry_after: str) -> float | None:
    """The header Retry-After, a number or a date, as seconds from now; None if there is none."""
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (ValueError, TypeError):
        return None


def plain(value: Any) -> Any:
    """JSON for what `json` does not know: mappings, numpy scalars and arrays; the text of anything else."""
    if isinstance(value, Mapping):
        return dict(value)
    return value.tolist() if hasattr(value, "tolist") else str(value)
