"""Dynamic batching: all queued rows up to a number of tokens, after a wait of a few milliseconds at most."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from rlcore import WorkerError
from rlcore.errors import boundary

Ids = Sequence[int]


class Batcher:
    """Collects rows into batches for one compute function, which runs on a separate thread.

    It never waits for a full batch: one row will do. Rows that arrive during a batch form the next one.
    """

    def __init__(self, compute: Callable[[list[Ids]], list[float]], batch_tokens: int, wait_s: float) -> None:
        self._compute, self._batch_tokens, self._wait_s = compute, batch_tokens, wait_s
        self._queue: deque[tuple[Ids, asyncio.Future[float]]] = deque()
        self._running: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward model")

    async def score(self, ids: Ids, ahead: bool = False) -> float:
        """The row's score; `ahead` skips the queue. An error of the function reaches every row of its batch."""
        future: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        if ahead:
            self._queue.appendleft((ids, future))
        else:
            self._queue.append((ids, future))
        if self._running is None:
            self._running = asyncio.create_task(self._run(), name="batches of a reward model")
        return await future

    async def drained(self) -> None:
        """Wait until no row is queued or being computed."""
        while self._running is not None:
            await asyncio.wait([self._running])

    def close(self) -> None:
        """End the thread after its current batch."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            await asyncio.sleep(self._wait_s)  # lets rows join the first; later batches form during the computation
            while self._queue:
                rows = self._next_batch()
                if not rows:
                    continue
                computed = loop.run_in_executor(self._thread, self._compute, [ids for ids, _ in rows])
                await asyncio.wait([computed])
                self._settle(rows, computed)
        finally:
            self._running = None
            for _, future in self._queue:
                future.cancel()
            self._queue.clear()

    async def probe(self, token_id: int, limit_s: float) -> None:
        """Compute a row of one token; WorkerError when that fails or takes longer than `limit_s`."""
        try:
            async with asyncio.timeout(limit_s):
                with boundary("a row of one token", WorkerError):
                    await self.score([token_id], ahead=True)
        except TimeoutError:
            raise WorkerError(f"a row of one token was not computed within {limit_s:g} s") from None

    def _next_batch(self) -> list[tuple[Ids, "asyncio.Future[float]"]]:
        """The rows from the head of the queue that fit, padding included; at least one."""
        rows: list[tuple[Ids, asyncio.Future[float]]] = []
        longest = 0
        while self._queue:
            ids, future = self._queue[0]
            wider = max(longest, len(ids))
            if rows and wider * (len(rows) + 1) > self._batch_tokens:
                break
            self._queue.popleft()
            if not future.done():  # rows whose caller has left are not computed
                rows.append((ids, future))
                longest = wider
        return rows

    def _settle(self, rows: list[tuple[Ids, "asyncio.Future[float]"]], computed: "asyncio.Future[list[float]]") -> None:
        error = computed.exception()
        scores = [0.0] * len(rows) if error is not None else computed.result()
        for (_, future), score in zip(rows, scores, strict=True):
            if future.done():
                continue
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(score)
