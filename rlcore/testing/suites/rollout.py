"""The suite of rollout workers."""

from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import numpy as np

from rlcore.contracts.actor import ActorWorker
from rlcore.contracts.rollout import ROLLOUT, RolloutWorker
from rlcore.contracts.stop_scan import StopScan
from rlcore.contracts.tokens import Tokens
from rlcore.data.batch import collate
from rlcore.data.tokenizer import load_tokens
from rlcore.testing.suites.harness import extra, loaded, need
from rlcore.testing.suites.workers import Work, WorkerSuite, batch_of
from rlcore.types import (
    Batch,
    Completion,
    FinishReason,
    GenerateRequest,
    Prompt,
    Reward,
    Sampling,
    ScoredTrajectory,
    Trajectory,
    TrajectoryId,
)

MAX_TOKENS = 6
TOLERANCE = 1e-4
VERSION = 5
"""Of the updated weights."""
MOST_UPDATES = 60
MOVED = 1.0
"""Nats per token by which updates move the actor's log-probs in a check that compares weights."""
FORMATS = 0.1
"""Largest difference in nats per token of the same weights in two engines, whose number formats may differ."""
Key = tuple[str, int]


class RolloutWorkerSuite(WorkerSuite):
    """A rollout worker; with `host`, it is embedded in that actor."""

    interface = RolloutWorker
    defaults: Mapping[str, Any] = {"rollout.temperature": 0.5, "actor.lr": 0.1}
    role = ROLLOUT.name
    actor: Any = ""
    """Claim: it loads the weights that an actor of this class writes or sends."""
    sleeps: bool = False
    """Claim: it sleeps and wakes."""
    asleep_s: float = 0.1
    """Seconds that it sleeps in a check: longer than an answer takes when it is awake."""
    repeats: bool = True
    """Claim: the same requests give the same tokens. Set it to False if a backend cannot do this."""
    truncates: bool = True
    """Claim: it applies top_k, top_p and min_p. Set it to False if a backend cannot do this."""

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

    @extra("truncates")
    def test_top_k_of_1_is_greedy(self) -> None:
        """The log-probs are divided by the mass that is kept, so they are 0."""

        async def main(work: Work) -> None:
            rollout, _ = await self._trained(work)
            greedy = texts(by_key(await generate(rollout, requests(temperature=0.0))))
            found = by_key(await generate(rollout, requests(top_k=1)))
            self.need(texts(found) == greedy, "samples with top_k=1 are not the greedy ones")
            lowest = min(float(completion.logprobs.min()) for completion in found.values())
            self.need(lowest >= -TOLERANCE, f"with top_k=1 a log-prob is {lowest:g}; needs 0, that of the kept tokens")

        self.use(main)

    def test_a_row_ends_at_a_stop_string(self) -> None:
        """The token that completes one is the last, and the row says that it stopped."""

        async def main(work: Work) -> None:
            config, rollout = self.config(), await work.start()
            tokens = load_tokens(config.model, config.data.system_prompt)
            stop = stop_strings(await generate(rollout, requests()), tokens)
            stopped = [
                self._ends_at(stop, completion, tokens) for completion in await generate(rollout, requests(stop=stop))
            ]
            self.need(any(stopped) or not stop or not self.repeats, f"no row ended at one of the stop strings {stop}")

        self.use(main)

    def _ends_at(self, stop: tuple[str, ...], completion: Completion, tokens: Tokens) -> bool:
        """True if the row has a stop string."""
        scan, ids = StopScan(stop, tokens.decode), completion.token_ids.tolist()
        end = next((end for end in range(1, len(ids) + 1) if scan.found(ids[:end])), 0)
        self.need(
            end in (0, len(ids)), f"a row has {len(ids)} tokens, and {end} complete one of the stop strings {stop}"
        )
        good = not end or completion.finish is FinishReason.STOP
        self.need(good, f"a row with one of the stop strings {stop} has finish={completion.finish!r}; needs STOP")
        return end > 0

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

    async def _trained(self, work: Work) -> tuple[Any, Any]:
        """A worker that samples with weights that its actor has updated, as version VERSION, and the actor.

        The actor is None, and the weights are the first ones, if the suite claims neither `host` nor `actor`.
        """
        rollout, actor = await work.start(), work.actor
        if not self.host and not self.actor:
            return rollout, None
        if actor is None:
            actor = await work.bench.start(loaded(self.actor), "actor", work.section)
        await self._train(actor)
        if self.host:
            await actor.call(ActorWorker.publish, VERSION)
            return rollout, actor
        handle = await actor.call(ActorWorker.weights, VERSION, work.bench.run_dir / "weights")
        version = await rollout.call(RolloutWorker.load_weights, handle)
        self.need(version == VERSION, f"load_weights() of version {VERSION} returned {version!r}")
        return rollout, actor

    async def _train(self, actor: Any) -> None:
        """Update until log-probs have moved so far that other weights show in any number format."""
        batch = batch_of(self.vocabulary)
        mask_BT, before_BT = batch.tokens.loss_mask_BT, await actor.call(ActorWorker.logprobs, batch)
        moved = 0.0
        await actor.call(ActorWorker.expect, MOST_UPDATES)
        for _ in range(MOST_UPDATES):
            await actor.call(ActorWorker.update, batch)
            now_BT = await actor.call(ActorWorker.logprobs, batch)
            moved = float(np.abs(now_BT - before_BT)[mask_BT].mean())
            if moved >= MOVED:
                return
        need(
            False, f"{self.who}: {MOST_UPDATES} updates of the actor moved log-probs by {moved:g} only; raise actor.lr"
        )

    @extra("host")
    def test_it_samples_with_the_version_that_its_host_published(self) -> None:
        """The next request samples with that version: log-probs are those of the host, at the run's temperature."""

        async def main(work: Work) -> None:
            await self._follows(*await self._trained(work), f"publish({VERSION})")

        self.use(main)

    @extra("actor")
    def test_it_samples_with_the_weights_it_was_handed(self) -> None:
        """`load_weights` returns their version, completions carry it, and log-probs are those of the actor."""

        async def main(work: Work) -> None:
            await self._follows(*await self._trained(work), f"load_weights() of version {VERSION}")

        self.use(main)

    async def _follows(self, rollout: Any, actor: Any, after: str) -> None:
        temperature = self.config().rollout.temperature
        found = await generate(rollout, requests(temperature=temperature))
        versions = {completion.version for completion in found}
        self.need(versions == {VERSION}, f"after {after} completions say version {sorted(versions)}; needs {VERSION}")
        batch = batch_of_completions(requests(), found)
        actor_BT = await actor.call(ActorWorker.logprobs, batch)
        off = float(np.abs(actor_BT - batch.tokens.rollout_logprobs_BT)[batch.tokens.loss_mask_BT].mean())
        self.need(
            off <= FORMATS,
            f"after {after} log-probs at temperature {temperature:g} differ from the actor's by {off:.3g} per token; "
            f"needs those of its weights, of softmax(logits / temperature), each at its token, within {FORMATS:g}",
        )

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


def requests(
    seed: int = 3, temperature: float = 1.0, top_k: int = 0, stop: tuple[str, ...] = ()
) -> list[GenerateRequest]:
    """Three requests of three samples each."""
    sampling = Sampling(temperature, top_k=top_k, max_tokens=MAX_TOKENS, stop=stop)
    return [
        GenerateRequest(f"p/{index}", tuple(b"say something, " + b"please" * index), sampling, n=3, seed=seed + index)
        for index in range(3)
    ]


async def generate(rollout: Any, requests: Sequence[GenerateRequest]) -> list[Completion]:
    """Every completion, in order of arrival."""
    async with aclosing(rollout.stream(RolloutWorker.generate, requests)) as items:
        return [completion async for completion in items]


def stop_strings(found: Sequence[Completion], tokens: Tokens) -> tuple[str, ...]:
    """Text of two tokens within each completion, where it has whole characters."""
    pairs = {tokens.decode(completion.token_ids[1:3].tolist()) for completion in found}
    return tuple(sorted(text for text in pairs if len(text) > 1 and "\N{REPLACEMENT CHARACTER}" not in text))


def batch_of_completions(requests: Sequence[GenerateRequest], found: Sequence[Completion]) -> Batch:
    """A batch with a row for each completion."""
    contexts = {request.id: request.token_ids for request in requests}
    return collate([[_row(contexts[completion.request_id], completion)] for completion in found], pad_id=0)


def _row(context: Sequence[int], completion: Completion) -> ScoredTrajectory:
    num, name = len(context), f"{completion.request_id}/{completion.sample}"
    trajectory = Trajectory(
        id=TrajectoryId(name, 0, 0),
        prompt=Prompt(name, (), None, "p"),
        token_ids=np.array([*context, *completion.token_ids], np.int32),
        loss_mask=np.arange(num + len(completion.token_ids)) >= num,
        logprobs=np.concatenate([np.zeros(num, np.float32), completion.logprobs]),
        completion="",
        finish=completion.finish,
        versions=((num, completion.version),),
    )
    return ScoredTrajectory(trajectory, Reward(0.0))


def by_key(found: Sequence[Completion]) -> dict[Key, Completion]:
    """Completions by request and sample."""
    return {(completion.request_id, completion.sample): replace(completion) for completion in found}


def texts(found: dict[Key, Completion]) -> dict[Key, tuple[int, ...]]:
    """The sampled ids by request and sample."""
    return {key: tuple(completion.token_ids.tolist()) for key, completion in found.items()}
