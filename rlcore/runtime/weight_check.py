"""Checks, on a fixed sentence, that rollout replicas sample with the weights that were handed to them."""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np

from rlcore.config import RolloutConfig
from rlcore.contracts.actor import ACTOR, ActorWorker
from rlcore.contracts.rollout import ROLLOUT, RolloutWorker
from rlcore.contracts.tokens import Tokens
from rlcore.contracts.workers import ReplicaEvent, ReplicaHandle, WorkerGroup
from rlcore.data.batch import collate
from rlcore.errors import WorkerError, worker_call
from rlcore.errors.checks.arrays import check_answer, check_completion, per_token
from rlcore.types import (
    Batch,
    Completion,
    Float32s,
    FrozenDict,
    GenerateRequest,
    Prompt,
    Reward,
    Sampling,
    ScoredTrajectory,
    Trajectory,
    TrajectoryId,
)

logger = logging.getLogger(__name__)

SENTENCE: FrozenDict[str, object] = FrozenDict({"role": "user", "content": "Tell me of the sea."})
NUM_TOKENS = 16
"""Maximum number of tokens sampled after the sentence."""
ANSWER_S = 30.0
"""Seconds that a weight sync waits for a replica that is busy with other rows."""
TIMES_FIRST, LEAST, TIMES_WARNED = 10.0, 0.01, 5.0
"""Bound of the difference per token: TIMES_FIRST times the first one, at least LEAST, and at most TIMES_WARNED times
`rollout.warn_logprob_diff`. The first difference reflects the engines' number formats: 1e-6 if both use float32, 0.04
in bfloat16."""
MOVED = 1e-5
"""Nats per token by which the actor's log-probs must move before a replica's must move, too."""


@dataclass(frozen=True, eq=False)
class _Sampled:
    """The sentence's ids, and a replica's continuation with a version of the weights."""

    version: int
    sentence: tuple[int, ...]
    completion: Completion


@dataclass(frozen=True, eq=False)
class _Answer:
    """A replica's continuation of the sentence, and both engines' log-probs of it."""

    version: int
    token_ids: tuple[int, ...]
    replica_N: Float32s
    actor_N: Float32s


class WeightsCheck:
    """Ends a run whose replicas do not follow the actor.

    Replicas sample after they received a version; in a synchronous run they are otherwise idle, so the same weights
    give the same numbers. The actor computes before the first update that learns from that version, when it has the
    shared devices.
    """

    def __init__(
        self,
        actor: WorkerGroup[ActorWorker],
        rollout: WorkerGroup[RolloutWorker],
        tokens: Tokens,
        config: RolloutConfig,
    ) -> None:
        self._actor, self._rollout, self._tokens, self._config = actor, rollout, tokens, config
        self._versions: list[int] = []
        """The first two versions that were sampled with in this process."""
        self._one_is_busy = False
        """True if a replica had no token within ANSWER_S when it was asked last."""
        self._pending: list[tuple[str, _Sampled]] = []
        """Samples of the current version by replica name, not yet computed by the actor."""
        self._first: dict[str, float] = {}
        """The first difference of each replica."""
        self._before: dict[str, _Answer] = {}
        """The last answer of each replica."""
        self._returned: set[str] = set()
        """Replicas that serve again after a restart and were not asked since."""
        rollout.on_event(self._note)

    def _note(self, event: ReplicaEvent) -> None:
        if event.kind == "restored":
            self._returned.add(event.name)

    async def sample(self, version: int) -> None:
        """Let replicas continue the sentence: all of them at the first two versions and at those of the settings, at
        any other version one in turn and those that were restarted. Lost ones are not asked.

        A replica that is too busy delays every hand-over, so none is asked in turn until all are asked again.
        """
        self._pending = []
        every, replicas = self._config.check_weights_every, self._rollout.replicas
        if not every:
            return
        if len(self._versions) < 2 and version not in self._versions:
            self._versions.append(version)
        if version in self._versions or version % every == 0:
            self._one_is_busy = False
        else:
            turn = None if self._one_is_busy else version % len(replicas)
            replicas = tuple(
                replica for index, replica in enumerate(replicas) if index == turn or replica.name in self._returned
            )
        replicas = tuple(
            replica for replica in replicas if replica.alive
        )  # a warning per step about a lost one would hide others
        self._returned -= {replica.name for replica in replicas}
        answers = await asyncio.gather(
            *(self._sampled(replica, version) for replica in replicas), return_exceptions=True
        )
        for replica, answer in zip(replicas, answers, strict=True):
            if isinstance(answer, BaseException):
                raise answer
            if answer is not None:
                self._pending.append((replica.name, answer))

    async def confirm(self) -> None:
        """Compare the samples' log-probs with those of the actor, whose weights are still of that version.

        WorkerError for a replica whose log-probs differ too much from the actor's, or stay the same while the actor's
        change. The latter is detected in any number format.
        """
        pending, self._pending = self._pending, []
        for name, sampled in pending:
            with worker_call(ROLLOUT.name, RolloutWorker.load_weights.__name__):
                await self._compare(name, sampled)

    async def _sampled(self, replica: ReplicaHandle[RolloutWorker], version: int) -> _Sampled | None:
        """The sampled continuation; None if the replica is being restarted or too busy."""
        try:
            async with asyncio.timeout(ANSWER_S):
                request = self._request(await replica.call(RolloutWorker.context_length))
                async with aclosing(replica.stream(RolloutWorker.generate, [request])) as stream:
                    completions = [completion async for completion in stream]
        except TimeoutError:
            self._one_is_busy = True
            logger.warning(
                "%s: version %d of the weights is not checked: no token in %g s", replica.name, version, ANSWER_S
            )
            return None
        except WorkerError as error:
            if replica.alive:
                raise
            logger.warning("%s; version %d of the weights is not checked there", error, version)
            return None
        who = f"{replica.name}.{RolloutWorker.generate.__name__}()"
        with worker_call(ROLLOUT.name, RolloutWorker.generate.__name__):
            if len(completions) != 1:
                raise WorkerError(f"{who} yielded {len(completions)} completions of one sample; needs 1")
            check_completion(who, completions[0], None)
            check_answer(who, completions[0], request, version)
        return _Sampled(version, request.token_ids, completions[0])

    def _request(self, window: int | None) -> GenerateRequest:
        """Requests a few tokens after the sentence, or after its end if the window does not fit all of it."""
        num = min(NUM_TOKENS, self._config.max_tokens)
        ids = self._tokens.encode_prompt((SENTENCE,))
        sampling = Sampling(temperature=self._config.temperature, max_tokens=num)
        kept = ids if window is None else ids[-max(1, window - num) :]
        return GenerateRequest("check of the weights", kept, sampling, 1, 0)

    async def _compare(self, name: str, sampled: _Sampled) -> None:
        version, completion, before = sampled.version, sampled.completion, self._before.get(name)
        ids = tuple(completion.token_ids.tolist())
        actor_N = await self._logprobs(_row(sampled.sentence, completion))
        answer = self._before[name] = _Answer(version, ids, completion.logprobs, actor_N)
        difference = _difference(answer.replica_N, answer.actor_N)
        bound = self._bound(self._first.setdefault(name, difference))
        if difference > bound:
            raise WorkerError(
                f"{name}: log-probs of a fixed sentence differ from the actor's by {difference:.3g} per token with "
                f"version {version} of the weights, where at most {bound:.3g} is expected; it samples with other "
                f"weights: {self._ways_out}"
            )
        if before is not None and _stands_still(before, answer):
            raise WorkerError(
                f"{name}: log-probs of a fixed sentence are the same with version {version} of the weights as with "
                f"version {before.version}, while the actor's moved by {_difference(before.actor_N, actor_N):.3g} per "
                f"token; it does not follow the actor: {self._ways_out}"
            )
        logger.info("%s follows: version %d of the weights, %.3g per token", name, version, difference)

    def _bound(self, first: float) -> float:
        return min(TIMES_WARNED * self._config.warn_logprob_diff, max(LEAST, TIMES_FIRST * first))

    @property
    def _ways_out(self) -> str:
        return (
            "look at load_weights() of the engine, rollout.weight_sync and the modules of an adapter, or set "
            "rollout.check_weights_every=0 to continue without this check"
        )

    async def _logprobs(self, row: ScoredTrajectory) -> Float32s:
        """(N,) log-probs of the actor, always for one row, so that the same weights give the same numbers."""
        replica = self._actor.replicas[0]
        batch: Batch = collate([[row]], self._tokens.pad_id)
        with worker_call(ACTOR.name, ActorWorker.logprobs.__name__):
            found = await replica.call(ActorWorker.logprobs, batch)
            who = f"{replica.name}.{ActorWorker.logprobs.__name__}()"
            logprobs_BT = per_token(who, found, batch, WorkerError, "log-probs")
        logprobs_N: Float32s = logprobs_BT[batch.tokens.loss_mask_BT]
        return logprobs_N


def _stands_still(before: _Answer, now: _Answer) -> bool:
    """True if a replica repeats its log-probs bit for bit, for tokens whose log-probs have changed in the actor."""
    return (
        before.version != now.version
        and before.token_ids == now.token_ids
        and np.array_equal(before.replica_N, now.replica_N)
        and _difference(before.actor_N, now.actor_N) > MOVED
    )


def _difference(one_N: Float32s, other_N: Float32s) -> float:
    """Mean absolute difference, in nats per token."""
    return float(np.abs(one_N.astype(np.float64) - other_N).mean())


def _row(sentence: Sequence[int], completion: Completion) -> ScoredTrajectory:
    """The sentence with its continuation, as a row for the actor."""
    num_prompt, num_sampled = len(sentence), len(completion.token_ids)
    name = completion.request_id
    trajectory = Trajectory(
        id=TrajectoryId(name, 0, 0),
        prompt=Prompt(name, (SENTENCE,), None, name),
        token_ids=np.array([*sentence, *completion.token_ids], np.int32),
        loss_mask=np.arange(num_prompt + num_sampled) >= num_prompt,
        logprobs=np.concatenate([np.zeros(num_prompt, np.float32), completion.logprobs]),
        completion="",
        finish=completion.finish,
        versions=((num_prompt, completion.version),),
    )
    return ScoredTrajectory(trajectory, Reward(0.0))
