"""The updates of one step: actor and critic are notified before their first and after their last."""

import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from types import TracebackType

from rlcore.contracts.actor import ACTOR, ActorWorker
from rlcore.errors import RlcoreError, WorkerError, worker_call
from rlcore.errors.checks.arrays import checked_metrics
from rlcore.runtime.launch import Runtime
from rlcore.types import Batch, Metrics

logger = logging.getLogger(__name__)

Notice = Callable[[], Awaitable[None]]


class Updates:
    """Updates actor and critic on mini-batches; a context manager for all updates of a step.

    Each is notified before its first update of the step, so an actor that waits for its critic loads nothing, and
    to end after the step's last update or an error. A cancelled step tells neither: a signal waits for no update.
    """

    def __init__(self, run: Runtime, steps_left: int) -> None:
        """`steps_left`: the steps of the run from this one on."""
        self._updates_left = steps_left * run.plan.batch_sizes["updates"]
        self._critic, self._actor, self._check = run.critic, run.actor.replicas[0], run.check
        self._begun: dict[str, Notice] = {}
        """Functions that notify begun models of the end, by name."""
        self.allowed: Counter[bool] = Counter()
        """The number of mini-batches on which the critic let the actor update, and on which it did not."""

    async def __aenter__(self) -> "Updates":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, Exception):
            return
        begun, self._begun = self._begun, {}
        failed: list[RlcoreError] = []
        for who, end in begun.items():
            try:
                await end()
            except RlcoreError as problem:
                failed.append(problem)
                logger.warning("%s: end_updates: %s", who, problem)
        if failed and error is None:
            raise failed[0]

    async def update(self, minibatch: Batch) -> Metrics:
        """One optimizer step of the critic and, unless the critic warms up, of the actor.

        WorkerError before the first where a rollout replica sampled with other weights than it was handed.
        """
        if self._check is not None:
            await self._check.confirm()
        await self._begin("critic", self._critic.begin_updates, self._critic.end_updates)
        minibatch = replace(minibatch, updates_left=self._updates_left)
        self._updates_left -= 1
        metrics = await self._critic.update(minibatch)
        may_update = self._critic.actor_may_update()
        self.allowed[may_update] += 1
        if may_update:
            call = self._actor.call
            await self._begin("actor", partial(call, ActorWorker.begin_updates), partial(call, ActorWorker.end_updates))
            with worker_call(ACTOR.name, ActorWorker.update.__name__):
                updated = await call(ActorWorker.update, minibatch)
                metrics |= checked_metrics(f"{self._actor.name}.update()", updated, WorkerError)
        return metrics

    async def _begin(self, who: str, begin: Notice, end: Notice) -> None:
        if who not in self._begun:
            self._begun[who] = end  # also of one that fails halfway
            await begin()
