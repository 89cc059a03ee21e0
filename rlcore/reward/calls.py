"""Calls one reward function: in a child or on the loop, with deadline, retries and failure policy."""

import asyncio
import logging
import random
import time
from collections.abc import Sequence

from rlcore.aio import Stopwatch, all_or_none
from rlcore.config import RewardFunctionConfig
from rlcore.contracts.call_log import CallLog
from rlcore.contracts.children import Children
from rlcore.contracts.scorer import Outcome, failed
from rlcore.errors import ChildError, ConfigError, PluginError, WorkerError
from rlcore.reward.call_arguments import prompt_of
from rlcore.reward.child_calls import Caller, ChildCaller
from rlcore.reward.group_scores import after_the_group, scored_indices, with_score
from rlcore.reward.loop_calls import Allowance, LoopCaller, Scores
from rlcore.reward.spec import FunctionSpec
from rlcore.reward.watchdog import LoopWatch
from rlcore.types import Lane, RewardStatus, Trajectory

logger = logging.getLogger(__name__)

FIRST_RETRY_S = 0.1
LOGGED_TRACES = 3
"""Maximum number of distinct tracebacks per function in the log."""
JITTER = random.Random()
"""A separate generator: the pauses of retries must not change other random numbers."""


class FunctionCalls:
    """A configured function; its calls, with deadline and retries, always end in outcomes."""

    def __init__(
        self,
        spec: FunctionSpec,
        config: RewardFunctionConfig,
        weight: float,
        deadline_s: float,
        after: "FunctionCalls | None" = None,
        log: CallLog | None = None,
    ) -> None:
        """`after`: the function that turns a group's scores into others. `log`: where calls are written."""
        self.spec, self.config, self.weight, self.deadline_s = spec, config, weight, deadline_s
        self._after, self._call_log = after, log
        self._caller: Caller | None = None
        self._looks_at_groups = False
        """A class that has `post_process_scores`; known after `start`."""
        self._traces: set[str] = set()

    @property
    def name(self) -> str:
        """The function's name in `reward.functions`."""
        return self.spec.name

    @property
    def scope(self) -> str:
        """The samples that a call sees."""
        return self.spec.scope

    @property
    def on_failure(self) -> str:
        """Empty: `reward.functions` states it."""
        return ""

    @property
    def post_processes(self) -> bool:
        """True if a group's scores are processed together; for a class, known after `start`."""
        return self._after is not None or self._looks_at_groups

    @property
    def is_async(self) -> bool:
        """True if it runs on the run's loop; known after `start`."""
        return isinstance(self._caller, LoopCaller)

    @property
    def num_restarts(self) -> int:
        """Children that had to be replaced so far."""
        return getattr(self._caller, "num_restarts", 0)

    async def start(self, children: Children, watch: LoopWatch, queued: Stopwatch) -> None:
        """Inspect the function in a child, and set it up where it runs: there, or on this loop."""
        starts = [self._start(children, watch, queued)]
        if self._after is not None:
            starts.append(self._after.start(children, watch, Stopwatch()))
        await all_or_none(starts)

    async def _start(self, children: Children, watch: LoopWatch, queued: Stopwatch) -> None:
        in_children = ChildCaller(self.spec, children, self.config, queued)
        self._caller = in_children
        first = await in_children.start_first()
        is_async, self._looks_at_groups = await first.call("kind", deadline_s=self.config.start_s)
        if self._looks_at_groups and self._after is not None:
            raise PluginError(
                f"{self.spec}: has post_process_scores, and reward.functions.{self.name}.post_process names another "
                "function; needs one of them"
            )
        if not is_async:
            await in_children.start_others()
            return
        if self.config.memory_gib:
            raise ConfigError(
                f"reward.functions.{self.name}.memory_gib: {self.spec} is async, so it runs in the process of the run, "
                "which has no limit; make it a plain function, or leave this out"
            )
        await in_children.close()
        on_loop = LoopCaller(self.spec, watch, queued, self.config.concurrency)
        self._caller = on_loop
        await on_loop.start(self.config.start_s)

    async def close(self) -> None:
        """Release everything, even if `start` failed."""
        if self._after is not None:
            await self._after.close()
        if self._caller is not None:
            await self._caller.close()

    async def score(self, trajectories: Sequence[Trajectory], lane: Lane) -> list[Outcome]:
        """An outcome for each trajectory; with on_failure=retry, retried while the deadline allows."""
        began = time.monotonic()
        outcomes = await self._ask(trajectories, lane)
        self._record(trajectories, outcomes, lane, began)
        return outcomes

    async def post_process(
        self, trajectories: Sequence[Trajectory], outcomes: Sequence[Outcome], lane: Lane
    ) -> list[Outcome]:
        """The outcomes after post-processing the group's scores; failed samples are left out of that."""
        good = scored_indices(outcomes)
        if not good:
            return list(outcomes)
        scores = [outcomes[index].score for index in good]
        judged = [trajectories[index] for index in good]
        if self._after is None:
            return after_the_group(outcomes, good, await self._ask(judged, lane, scores))
        scored = [with_score(trajectory, score) for trajectory, score in zip(judged, scores, strict=True)]
        return after_the_group(outcomes, good, await self._after.score(scored, lane))

    async def _ask(self, trajectories: Sequence[Trajectory], lane: Lane, scores: Scores = None) -> list[Outcome]:
        """The outcome of each sample in the last try that did not fail it; of the last try where all did."""
        allowance = Allowance(self.deadline_s)
        tries = self.config.tries if self.config.on_failure == "retry" else 1
        pause = FIRST_RETRY_S
        if self._caller is None:
            raise WorkerError(f"{self.spec}: was called before it was started")
        outcomes: list[Outcome] = []
        while True:
            tries -= 1
            try:
                latest = await self._caller.call(trajectories, lane, allowance, scores)
            except (TimeoutError, ChildError, WorkerError) as cause:
                latest = [self._failed(cause, allowance)] * len(trajectories)
            outcomes = _latest_that_did_not_fail(outcomes, latest) if outcomes else latest
            if tries <= 0 or all(outcome.status is not RewardStatus.FAILED for outcome in outcomes):
                return outcomes
            wait = pause * JITTER.uniform(0.5, 1.5)
            if allowance.left_s <= wait:
                return outcomes
            await asyncio.sleep(wait)
            allowance.left_s -= wait
            pause *= 2

    def _record(
        self, trajectories: Sequence[Trajectory], outcomes: Sequence[Outcome], lane: Lane, began: float
    ) -> None:
        """A line per sample of the call; the latency is that of the call, waiting and tries included."""
        if self._call_log is None:
            return
        latency_s = time.monotonic() - began
        for trajectory, outcome in zip(trajectories, outcomes, strict=True):
            sample = trajectory.id
            more = {"error": outcome.error} if outcome.error else {}
            self._call_log.record(
                reward=self.name,
                id=f"{sample.prompt}/{sample.epoch}/{sample.sample}",
                target=self.spec.target,
                query=prompt_of(trajectory.prompt),
                response=trajectory.text(),
                status=outcome.status.value,
                score=outcome.score if outcome.status is RewardStatus.OK else None,
                latency_s=round(latency_s, 6),
                lane=lane.value,
                **more,
            )

    def _failed(self, cause: TimeoutError | ChildError | WorkerError, allowance: Allowance) -> Outcome:
        if isinstance(cause, TimeoutError):
            allowance.left_s = 0.0
            return failed(f"no result within {self.deadline_s:g} s")
        if isinstance(cause, ChildError):
            self._log(cause.trace)
        return failed(str(cause))

    def _log(self, trace: str) -> None:
        if trace and trace not in self._traces and len(self._traces) < LOGGED_TRACES:
            self._traces.add(trace)
            logger.warning("%s raised:\n%s", self.spec, trace)


def _latest_that_did_not_fail(before: Sequence[Outcome], latest: Sequence[Outcome]) -> list[Outcome]:
    """A later try that fails as a whole, or a sample that an earlier one scored, takes no score away."""
    pairs = zip(before, latest, strict=True)
    failed = RewardStatus.FAILED
    return [old if new.status is failed and old.status is not failed else new for old, new in pairs]
