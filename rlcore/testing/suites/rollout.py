"""The suite of rollout workers."""

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import numpy as np

from rlcore.contracts.actor import ActorWorker
from rlcore.contracts.rollout import ROLLOUT, RolloutWorker
from rlcore.testing.suites.harness import extra, loaded, need
from rlcore.testing.suites.workers import Work, WorkerSuite
from rlcore.types import Completion, FinishReason, GenerateRequest, Sampling

MAX_TOKENS = 6
TOLERANCE = 1e-4
Key = tuple[str, int]


class RolloutWorkerSuite(WorkerSuite):
    """A rollout worker; with `host`, it is embedded in that actor."""

    interface = RolloutWorker
    role = ROLLOUT.name
    actor: Any = ""
    """Claim: it loads the weights that an actor of this class writes or sends."""
    sleeps: bool = False
    """Claim: it sleeps and wakes."""
    asleep_s: float = 0.1
    """Seconds that it sleeps in a check: longer than an answer takes when it is awake."""
    repeats: bool = True
    """Claim: the same requests give the same tokens. Set it to False if a backend cannot do this."""

    def test_every_sample_of_every_request_comes_once(self) -> None:
        """Completions match the requests by id and sample index, and there are no others."""

        async def main(work: Work) -> None:
            found = await generate(await work.start(), requests())
            keys = sorted((completion.request_id, completion.sample) for completion in found)
            wanted = sorted((request.id, sample) for request in requests() for sample in range(request.n))
            self.need(keys == wanted, f"{len(keys)} completions for {len(wanted)} samples: {keys}; needs each once")

        self.use(main)

    def test_a_completion_is_whole(self) -> None:
        """It has ids of the vocabulary with their log-probs, at most `max_tokens` of them, and a finish reason."""

        async def main(work: Work) -> None:
            for completion in await generate(await work.start(), requests()):
                self._is_whole(completion)

        self.use(main)

    def _is_whole(self, completion: Completion) -> None:
        ids_N, logprobs_N = completion.token_ids, completion.logprobs
        kinds = (str(ids_N.dtype), str(logprobs_N.dtype))
        self.need(kinds == ("int32", "float32"), f"ids and log-probs are {kinds}; needs int32 and float32")
        self.need(ids_N.shape == logprobs_N.shape and ids_N.ndim == 1, "ids and log-probs differ in shape; needs (N,)")
        self.need(1 <= len(ids_N) <= MAX_TOKENS, f"{len(ids_N)} tokens; needs 1 to max_tokens={MAX_TOKENS}")
        inside = int(ids_N.min()) >= 0 and int(ids_N.max()) <= self.largest_id
        self.need(inside, f"ids {ids_N.tolist()} are not all from 0 to {self.largest_id}")
        good = np.isfinite(logprobs_N).all() and float(logprobs_N.max()) <= TOLERANCE
        self.need(bool(good), f"log-probs {logprobs_N.tolist()}; needs finite ones of at most 0")
        self.need(
            isinstance(completion.finish, FinishReason),
            f"finish is {completion.finish!r}; needs FinishReason.STOP or FinishReason.LENGTH",
        )
        cut = completion.finish is FinishReason.LENGTH
        self.need(not cut or len(ids_N) == MAX_TOKENS, f"it says it was cut, after {len(ids_N)} of {MAX_TOKENS} tokens")
        self.need(
            isinstance(completion.version, int) and completion.version >= 0,
            f"version is {completion.version!r}; needs an int",
        )

    largest_id: int = 263
    """Largest id of the model's vocabulary."""

    @extra("repeats")
    def test_the_order_of_requests_changes_nothing(self) -> None:
        """The same set gives the same tokens and log-probs."""

        async def main(work: Work) -> None:
            rollout = await work.start()
            one = by_key(await generate(rollout, requests()))
            other = by_key(await generate(rollout, requests()[::-1]))
            self._same(one, other, "in another order")

        self.use(main)

    @extra("repeats")
    def test_seeds_decide_what_is_sampled(self) -> None:
        """The same seed gives the same tokens, also in another worker. Other seeds and other samples differ."""

        async def main(work: Work) -> None:
            one = by_key(await generate(await work.start(), requests()))
            rollout = await work.start()
            self._same(one, by_key(await generate(rollout, requests())), "in another worker")
            other = by_key(await generate(rollout, requests(seed=77)))
            self.need(texts(one) != texts(other), "another seed gives the same tokens")
            self.need(len(set(texts(one).values())) > 1, "all samples are the same; each needs a separate stream")

        self.use(main)

    def _same(self, one: dict[Key, Completion], other: dict[Key, Completion], where: str) -> None:
        self.need(texts(one) == texts(other), f"the same requests give other tokens {where}")
        for key, trajectory in one.items():
            off = float(np.abs(trajectory.logprobs - other[key].logprobs).max())
            self.need(off <= TOLERANCE, f"log-probs differ by {off:g} {where}")

    def test_greedy_samples_are_equal(self) -> None:
        """The temperature is 0."""

        async def main(work: Work) -> None:
            found = by_key(await generate(await work.start(), requests(temperature=0.0)))
            for request in requests():
                mine = {text for (name, _), text in texts(found).items() if name == request.id}
                self.need(len(mine) == 1, f"greedy samples of '{request.id}' differ")

        self.use(main)

    def test_a_stream_that_is_closed_early_disturbs_no_other(self) -> None:
        """The next stream is complete."""

        async def main(work: Work) -> None:
            rollout = await work.start()
            async with aclosing(rollout.stream(RolloutWorker.generate, requests())) as items:
                async for _ in items:
                    break
            found = await generate(rollout, requests())
            wanted = sum(request.n for request in requests())
            self.need(len(found) == wanted, f"after an early close {len(found)} of {wanted} samples came")

        self.use(main)

    def test_it_says_what_it_serves(self) -> None:
        """`health` returns words, `context_length` a number or None."""

        async def main(work: Work) -> None:
            rollout = await work.start()
            health = await rollout.call(RolloutWorker.health)
            self.need(isinstance(health, str) and bool(health), f"health() returned {health!r}; needs words")
            window = await rollout.call(RolloutWorker.context_length)
            good = window is None or (isinstance(window, int) and window > 0)
            self.need(good, f"context_length() returned {window!r}; needs a positive int or None")

        self.use(main)

    @extra("host")
    def test_it_samples_with_the_version_that_its_host_published(self) -> None:
        """The next request samples with that version."""

        async def main(work: Work) -> None:
            rollout = await work.start()
            need(work.actor is not None, f"{self.who}: no host")
            if work.actor is not None:
                await work.actor.call(ActorWorker.publish, 5)
            found = {completion.version for completion in await generate(rollout, requests())}
            self.need(found == {5}, f"after publish(5) completions say version {sorted(found)}; needs 5")

        self.use(main)

    @extra("actor")
    def test_it_samples_with_the_weights_it_was_handed(self) -> None:
        """`load_weights` returns their version, and completions carry it."""

        async def main(work: Work) -> None:
            rollout = await work.start()
            actor = await work.bench.start(loaded(self.actor), "actor", work.section)
            handle = await actor.call(ActorWorker.weights, 4, work.bench.run_dir / "weights")
            version = await rollout.call(RolloutWorker.load_weights, handle)
            self.need(version == 4, f"load_weights() of version 4 returned {version!r}")
            found = {completion.version for completion in await generate(rollout, requests())}
            self.need(found == {4}, f"after load_weights() of version 4 completions say {sorted(found)}")

        self.use(main)

    @extra("sleeps")
    def test_it_serves_no_request_while_it_sleeps(self) -> None:
        """Requests wait until it wakes. Waking twice changes nothing."""

        async def main(work: Work) -> None:
            import asyncio

            rollout = await work.start()
            await rollout.call(RolloutWorker.sleep)
            asking = asyncio.create_task(generate(rollout, requests()))
            done, _ = await asyncio.wait({asking}, timeout=self.asleep_s)
            for _ in range(2):
                await rollout.call(RolloutWorker.wake)
            found = await asking
            self.need(not done, "it answered while it slept")
            self.need(len(found) == sum(request.n for request in requests()), "not every sample came after it woke")

        self.use(main)


def requests(seed: int = 3, temperature: float = 1.0) -> list[GenerateRequest]:
    """Three requests of three samples each."""
    sampling = Sampling(temperature=temperature, max_tokens=MAX_TOKENS)
    return [
        GenerateRequest(f"p/{index}", tuple(b"say something, " + b"please" * index), sampling, n=3, seed=seed + index)
        for index in range(3)
    ]


async def generate(rollout: Any, requests: Sequence[GenerateRequest]) -> list[Completion]:
    """Every completion, in order of arrival."""
    async with aclosing(rollout.stream(RolloutWorker.generate, requests)) as items:
        return [completion async for completion in items]


def by_key(found: Sequence[Completion]) -> dict[Key, Completion]:
    """Completions by request and sample."""
    return {(completion.request_id, completion.sample): replace(completion) for completion in found}


def texts(found: dict[Key, Completion]) -> dict[Key, tuple[int, ...]]:
    """The sampled ids by request and sample."""
    return {key: tuple(completion.token_ids.tolist()) for key, completion in found.items()}
