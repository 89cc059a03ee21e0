"""Measures the reward loop, client and service on one machine, through the production manager.

    .venv/bin/python benchmarks/reward_service.py [--smoke]

Prints one JSON line:

* `requests_per_s`: samples per second with a service that takes no time and runs in another process.
  `bare_requests_per_s`: the same number of equal requests by aiohttp alone, in turns with ours. `of_bare`: the ratio.
* `efficiency`: the time of the full `rounds` over the measured time, from the first sample to the last reward. 256
  calls are in flight to a service that takes 250 ms. The first calls are sent, and the last ones answered, one after
  another. `bare_efficiency`: that of aiohttp alone.
* `eval_slowdown`: the time of an evaluation of 64 samples while 5000 training samples are pending, over its time alone.
  There are 64 slots, and the service takes U(0.05, 0.15) s.

Python's garbage collector has the settings of a training run (`rlcore.train.trainer`), for ours and for bare aiohttp.
"""

import argparse
import asyncio
import gc
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any, cast

import aiohttp
from measure import emit, say, summary
from rlcore_reward_loop import build
from rlcore_reward_loop.rewards import question
from rlcore_reward_loop.settings import RewardLoopSettings, RewardSettings, ServiceSettings

from rlcore.contracts.reward_manager import RewardManager
from rlcore.testing.rewards import make_trajectory, reward_context
from rlcore.types import Lane, RewardStatus, Trajectory

IN_FLIGHT, SERVICE_S = 256, 0.25
EVAL_SLOTS = 64
TOGETHER = 32
"""Samples submitted per iteration of the event loop, if there is room. With one per iteration, slots would wait."""
LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
ANSWER = b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 14\r\n\r\n{"score": 1.0}'


class Answers(asyncio.Protocol):
    """One connection to the service. It does as little as a service can, because the service must not limit the
    result."""

    def __init__(self, draw: Callable[[], float]) -> None:
        self._draw, self._received = draw, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport for the answers."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Answer a request once it is complete; a client sends the next one after that."""
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        length = LENGTH.search(head)
        if not found or length is None or len(body) < int(length.group(1)):
            return
        self._received = b""
        pause_s = self._draw()
        if pause_s:
            asyncio.get_running_loop().call_later(pause_s, self._answer)
        else:
            self._answer()

    def _answer(self) -> None:
        if not self._transport.is_closing():
            self._transport.write(ANSWER)


async def serve(shortest_s: float, longest_s: float) -> None:
    """The service. It prints its port, and ends with the process that started it."""
    loop, stop, random_ = asyncio.get_running_loop(), asyncio.Event(), random.Random(0)
    server = await loop.create_server(lambda: Answers(lambda: random_.uniform(shortest_s, longest_s)), "127.0.0.1", 0)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    loop.add_reader(sys.stdin.fileno(), stop.set)
    await stop.wait()
    server.close()


@contextmanager
def serving(shortest_s: float, longest_s: float) -> Iterator[str]:
    """Runs the service in a separate process; yields its address."""
    command = [sys.executable, __file__, "--serve", str(shortest_s), str(longest_s)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        if process.stdout is None:
            raise OSError("the service's output is not connected")
        yield process.stdout.readline().strip()
    finally:
        process.communicate(timeout=20)


def manager_of(url: str, run_dir: Path, **service: Any) -> RewardManager:
    """The reward loop as a run would build it, with one reward from this service."""
    settings = RewardLoopSettings(
        rewards={"helpful": RewardSettings(served_by="scorer")},
        services={"scorer": ServiceSettings(urls=(url,), **service)},
    )
    return build(reward_context({}, run_dir, section=settings))


async def seconds_of(
    manager: RewardManager, trajectories: Sequence[Trajectory], lane: Lane, most_pending: int = 0
) -> float:
    """Seconds until all samples, which are ready, are scored; at most `pending` are pending, 0: any number."""
    room = asyncio.Semaphore(most_pending or len(trajectories))

    async def stream() -> AsyncIterator[Trajectory]:
        for index, trajectory in enumerate(trajectories):
            await room.acquire()
            if index % TOGETHER == 0:
                await asyncio.sleep(0)
            yield trajectory

    began = time.perf_counter()
    async with aclosing(manager.score(stream(), lane)) as results:  # type: ignore[type-var]
        statuses = []
        async for result in results:
            statuses.append(result.reward.status)
            room.release()
    took = time.perf_counter() - began
    if statuses != [RewardStatus.OK] * len(trajectories):
        raise RuntimeError(f"{statuses.count(RewardStatus.FAILED)} of {len(trajectories)} samples failed")
    return took


def samples(number: int) -> list[Trajectory]:
    """Samples with texts of a few words."""
    return [make_trajectory(index // 8, index % 8) for index in range(number)]


async def rounds(run_dir: Path, service_s: float, number: int, repeats: int) -> list[float]:
    """Seconds of `number` training samples with 256 in flight, per repeat; connections are opened earlier."""
    with serving(service_s, service_s) as url:
        manager = manager_of(url, run_dir, concurrency=IN_FLIGHT)
        await manager.start()
        try:
            await seconds_of(manager, samples(IN_FLIGHT), Lane.TRAIN)
            return [await seconds_of(manager, samples(number), Lane.TRAIN, 4 * IN_FLIGHT) for _ in range(repeats)]
        finally:
            await manager.close()


async def bare_seconds(session: aiohttp.ClientSession, url: str, number: int) -> float:
    """Seconds for `number` calls by aiohttp alone, 256 at a time."""
    body = json.dumps(question(make_trajectory(0))).encode()
    left = iter(range(number))

    async def ask() -> None:
        for _ in left:
            async with session.post(url, data=body, headers={"Content-Type": "application/json"}) as response:
                await response.json()

    began = time.perf_counter()
    await asyncio.gather(*(ask() for _ in range(IN_FLIGHT)))
    return time.perf_counter() - began


async def bare_rounds(service_s: float, number: int) -> float:
    """Seconds for `number` calls by aiohttp alone to a service with this delay, 256 at a time."""
    with serving(service_s, service_s) as url:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            await bare_seconds(session, url, IN_FLIGHT)
            return await bare_seconds(session, url, number)


async def compared_with_bare(run_dir: Path, number: int, repeats: int) -> tuple[list[float], list[float]]:
    """Seconds of `number` training samples with a service that takes no time, and of aiohttp alone, in turns."""
    ours, bare = [], []
    with serving(0.0, 0.0) as url:
        manager = manager_of(url, run_dir, concurrency=IN_FLIGHT)
        await manager.start()
        try:
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
                await seconds_of(manager, samples(IN_FLIGHT), Lane.TRAIN)
                await bare_seconds(session, url, IN_FLIGHT)
                for _ in range(repeats):
                    ours.append(await seconds_of(manager, samples(number), Lane.TRAIN, 4 * IN_FLIGHT))
                    bare.append(await bare_seconds(session, url, number))
        finally:
            await manager.close()
    return ours, bare


async def lanes(run_dir: Path, pending: int, repeats: int) -> tuple[list[float], list[float]]:
    """Seconds of an evaluation of 64 samples: alone, and while training samples are pending."""
    alone, busy = [], []
    with serving(0.05, 0.15) as url:
        manager = manager_of(url, run_dir, concurrency=EVAL_SLOTS, eval_slots=EVAL_SLOTS)
        await manager.start()
        try:
            await seconds_of(manager, samples(EVAL_SLOTS), Lane.EVAL)
            alone = [await seconds_of(manager, samples(EVAL_SLOTS), Lane.EVAL) for _ in range(repeats)]
            training = asyncio.create_task(seconds_of(manager, samples(pending), Lane.TRAIN))
            await asyncio.sleep(0.2)
            for _ in range(repeats):
                busy.append(await seconds_of(manager, samples(EVAL_SLOTS), Lane.EVAL))
            if training.done():
                raise RuntimeError("the training samples were scored before the evaluations: too few were pending")
            training.cancel()
            await asyncio.gather(training, return_exceptions=True)
        finally:
            await manager.close()
    return alone, busy


@contextmanager
def collector_of_a_run() -> Iterator[None]:
    """The garbage collector as it is while a run trains."""
    from rlcore.train.trainer import QUIET_THRESHOLDS  # late: it imports torch, which the service does not need

    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*QUIET_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def main(arguments: argparse.Namespace) -> None:
    """Measure and print."""
    number, repeats, pending = (512, 1, 500) if arguments.smoke else (6000, 5, 5000)
    num_rounds = 2 if arguments.smoke else 40
    with tempfile.TemporaryDirectory() as directory, collector_of_a_run():
        run_dir = Path(directory)
        say("a service that takes no time")
        fast, bare = asyncio.run(compared_with_bare(run_dir, number, repeats))
        say("a service that takes 250 ms")
        slow = asyncio.run(rounds(run_dir, SERVICE_S, IN_FLIGHT * num_rounds, min(repeats, 3)))
        bare_slow = asyncio.run(bare_rounds(SERVICE_S, IN_FLIGHT * num_rounds))
        say("an evaluation during training")
        alone, busy = asyncio.run(lanes(run_dir, pending, repeats))
    result = {
        "requests_per_s": summary([number / duration for duration in fast]),
        "bare_requests_per_s": summary([number / duration for duration in bare]),
        "of_bare": summary([other / duration for duration, other in zip(fast, bare, strict=True)]),
        "efficiency": summary([num_rounds * SERVICE_S / duration for duration in slow]),
        "bare_efficiency": num_rounds * SERVICE_S / bare_slow,
        "eval_alone_s": summary(alone),
        "eval_beside_training_s": summary(busy),
        "eval_slowdown": summary(busy)["median"] / summary(alone)["median"],
        "in_flight": IN_FLIGHT,
        "rounds": num_rounds,
        "eval_slots": EVAL_SLOTS,
        "pending": pending,
    }
    emit("reward_service", result)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="small numbers, to see that it runs")
    parser.add_argument("--serve", nargs=2, type=float, metavar="SECONDS", help="be the service")
    parsed = parser.parse_args()
    if parsed.serve:
        asyncio.run(serve(*parsed.serve))
    else:
        main(parsed)
