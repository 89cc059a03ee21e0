"""A step's share of the prompts in flight: sampled, prepared while rewards are pending, and turned into mini-batches.

The four schedules differ here and in `RolloutBuffer.refill` only: how far ahead prompts are issued, and whether
mini-batches are cut from a whole step in canonical order or formed from the first groups whose rewards arrive.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from types import TracebackType

from rlcore_view import StepFacts

from rlcore.algo.decoupled import FunctionScores, function_scores
from rlcore.algo.kl import FixedKl
from rlcore.algo.reward_shaping import rewards_all_equal
from rlcore.algo.step import weigh, with_advantages
from rlcore.algo.top_entropy import only_top_entropy
from rlcore.contracts.offers import Need
from rlcore.errors import PluginError, WorkerError
from rlcore.report.learning import step_facts
from rlcore.report.metrics import average, trajectory_lines
from rlcore.reward.policy import Budget, apply_failures
from rlcore.reward.step_metrics import reward_metrics
from rlcore.runtime.launch import Runtime, owner_of
from rlcore.train.buffer import RolloutBuffer
from rlcore.train.greedy import with_greedy_baselines
from rlcore.train.minibatches import completion_metrics, epoch_minibatches, later_epoch, one_ahead, row_advantages
from rlcore.train.passes import ForwardPasses
from rlcore.train.pending import Group, PendingGroup
from rlcore.train.timing import StepTimeline, length_correlation, now
from rlcore.train.versions import sampled_with
from rlcore.types import Batch, Lane, Metrics, Reward, RewardStatus, ScoredTrajectory, Trajectory, TrajectoryId

logger = logging.getLogger(__name__)


class StepBatcher:
    """The work of one step, from the prompts that it needs to the mini-batches that it trains on."""

    def __init__(self, run: Runtime, buffer: RolloutBuffer, kl: FixedKl, step: int, last_step: int) -> None:
        """`step` publishes the version with that number; only prompts that a step up to `last_step` needs are
        issued."""
        self._run, self._buffer, self._kl, self._step, self._last_step = run, buffer, kl, step, last_step
        self._config, self._schedule = run.plan.config, run.plan.schedule
        self.timeline = StepTimeline()
        self._members: list[PendingGroup] = []
        """Prompts that this step must train on; none if steps take the first ready prompts."""
        self._arrays = ForwardPasses(run, self.timeline)
        self.taken: list[PendingGroup] = []
        """Prompts that this step uses up, dropped ones included."""
        self.everything: list[ScoredTrajectory] = []
        """Every scored trajectory of theirs, also failed and replaced ones, in the order in which prompts were issued;
        empty until all are scored."""
        self.advantages: dict[TrajectoryId, float] = {}
        """Weights of the rows that are trained on."""
        self._preparing: asyncio.Task[None] | None = None
        self._writing: asyncio.Task[tuple[bytes, StepFacts]] | None = None
        self._ended = False
        self._metrics: Metrics = {}
        self._measured: Metrics | None = None
        self._prepared: list[Metrics] = []
        self.batches: list[tuple[Sequence[TrajectoryId], Batch]] = []
        """Ids of the rows and the batch, of everything that is trained on."""
        self._trained: list[tuple[int, ScoredTrajectory]] = []
        """Rows with the index of their mini-batch in the first epoch; 0 where mini-batches are not streamed."""

    def issue_prompts(self) -> Sequence[PendingGroup]:
        """Issue the prompts that the schedule allows; returns the prompts that this step must train on."""
        self._members = self._buffer.refill(self._step, self._last_step)
        return self._members

    async def sampled_trajectories(self, prompts: Sequence[PendingGroup]) -> list[Trajectory]:
        """The trajectories of the prompts, after all sampling that must not overlap with updates has ended.

        Each of them goes to its reward as soon as it is finished.
        """
        await self._buffer.sampled(None if self._schedule.sample_before_update else prompts)
        self.timeline.sample_end()
        return [trajectory for prompt in prompts for trajectory in prompt.trajectories.values()]

    def begin_passes(self, trajectories: Sequence[Trajectory]) -> None:
        """Start the forward passes that do not need rewards; they run while rewards are pending.

        Does nothing with dynamic sampling, where replaced prompts would be computed in vain, and if it would put
        servers to sleep that compute pending rewards.
        """
        if not self._config.algo.dynamic_sampling and not self._run.lease.shared:
            self._preparing = asyncio.create_task(self._arrays.ensure(trajectories), name="forward passes")
            self._buffer.watch(self._preparing)

    async def __aenter__(self) -> "StepBatcher":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel pending work, and return shared devices to the servers, however the step ended.

        A server that does not wake after an error is logged: the error is the cause.
        """
        try:
            await self._end_begun()
        finally:
            try:
                await self._run.lease.serve()
            except WorkerError as problem:
                if error is None:
                    raise
                logger.warning("after %s: %s", type(error).__name__, problem)

    async def _end_begun(self) -> None:
        begun = [task for task in (self._preparing, None if self._ended else self._writing) if task is not None]
        for task in begun:
            task.cancel()
        await asyncio.gather(*begun, return_exceptions=True)

    def scored_groups(self) -> AsyncGenerator[list[Group], None]:
        """The groups to train on: all of the step together, or those of each mini-batch as its rewards come in."""
        return self._first_ready() if self._schedule.stream else self._whole_step()

    def minibatches(self, groups: AsyncGenerator[list[Group], None]) -> AsyncGenerator[Batch, None]:
        """Yields every weighted mini-batch of every epoch as soon as it may be trained on."""
        return one_ahead(self._minibatches(groups))

    async def _minibatches(self, groups: AsyncGenerator[list[Group], None]) -> AsyncGenerator[Batch, None]:
        config, number = self._config, self._step - 1
        streamed: list[Batch] = []
        async with aclosing(groups):
            async for ready in groups:
                if self._schedule.stream:
                    batch = await self._finish(ready, len(streamed))
                    streamed.append(weigh(batch, config.algo, self._run.selection))
                    yield streamed[-1]
                    continue
                await self._run.lease.train()
                batch = await self._finish(ready, 0)
                for epoch in range(config.actor.epochs):
                    for minibatch in epoch_minibatches(self._run, batch, number, epoch):
                        yield minibatch
                        self._settle()
        if self._schedule.stream:
            self._settle()
            for epoch in range(1, config.actor.epochs):
                for minibatch in later_epoch(streamed, config.train.seed, number, epoch):
                    yield minibatch

    def records(self) -> "asyncio.Task[tuple[bytes, StepFacts]]":
        """Lines and facts of all trajectories, once rewards and advantages are known; made in a thread during an
        update."""
        if self._writing is None:
            writing = asyncio.to_thread(_records, self._step, self.outcomes())
            self._writing = asyncio.create_task(writing, name=f"lines of step {self._step}")
        return self._writing

    def outcomes(self) -> list[tuple[ScoredTrajectory, float | None]]:
        """Every trajectory with its advantage, as they are recorded: a failed reward keeps its status and has the score
        that was trained on."""
        advantages, rewards = self.advantages, {row.trajectory.id: row.reward for _, row in self._trained}
        return [
            (
                row if row.reward.status is RewardStatus.OK else _with_score(row, rewards),
                advantages.get(row.trajectory.id),
            )
            for row in self.everything
        ]

    def end(self) -> Metrics:
        """End the step; returns metrics of samples and schedule."""
        self._ended = True
        self._kl.end_step()
        self.timeline.end()
        self._measure()
        schedule = self.timeline.metrics(self.taken, self._schedule.stream, self._config.actor.minibatch_prompts)
        measured, step_s = self._measured or {}, schedule["time/step_s"]
        num_sampled = measured.get("completion/length_mean", 0.0) * len(self.everything)
        schedule["time/tokens_per_s"] = num_sampled / step_s if step_s > 0 else 0.0
        return self._metrics | measured | average(self._prepared) | schedule

    def _settle(self) -> None:
        """After everything is sampled and scored: do the work that can overlap with an update."""
        if self._measured is None:
            self._measure()
            self.records()
            self._buffer.tidy()

    def _measure(self) -> None:
        if self._measured is None:
            issued = sorted(self.taken, key=lambda task: task.number)
            everything = self.everything = [row for pending in issued for row in pending.group()]
            self._measured = reward_metrics(everything) | completion_metrics(everything) | self._staleness()

    def _num_prompts(self) -> int:
        """The number of prompts that the step uses up, without replaced ones."""
        return len(self._members) or self._config.train.prompts_per_step

    async def _whole_step(self) -> AsyncGenerator[list[Group], None]:
        yield await self._all_groups()

    async def _all_groups(self) -> list[Group]:
        """The groups of the step, in the order in which they were issued.

        With `algo.dynamic_sampling`, groups whose rewards are all equal are replaced by groups of further prompts of
        the same order, for at most `algo.max_resample_rounds` rounds (arXiv 2503.14476, section 3.2); equal groups fill
        what is then missing, with advantage 0.
        """
        algo, wanted = self._config.algo, self._config.train.prompts_per_step
        groups, spare = list[Group](), list[Group]()
        budgets = self._budget(self._config.rollout.samples_per_prompt), self._budget(1)
        kept = await self._round(self._num_prompts(), *budgets)
        if not algo.dynamic_sampling:
            return kept
        rounds = 0
        while True:
            equal = rewards_all_equal(kept)
            groups += [group for group, same in zip(kept, equal, strict=True) if not same]
            spare += [group for group, same in zip(kept, equal, strict=True) if same]
            if len(groups) >= wanted or rounds >= algo.max_resample_rounds:
                break
            rounds += 1
            self._buffer.issue(wanted - len(groups), self._step)
            kept = await self._round(wanted - len(groups), *budgets)
        self._metrics |= {"data/resample_rounds": float(rounds), "data/equal_groups": float(len(spare))}
        return groups[:wanted] + spare[: max(0, wanted - len(groups))]

    def _budget(self, samples_per_prompt: int) -> Budget:
        return Budget(self._num_prompts() * samples_per_prompt, self._config.reward)

    async def _round(self, num: int, budget: Budget, greedy: Budget) -> list[Group]:
        """The groups that the failure policies leave of the next `num` prompts. `greedy` is for their baselines."""
        began = now()
        taken = sorted([await self._next(began) for _ in range(num)], key=lambda pending: pending.number)
        groups = [pending.group() for pending in taken]
        kept, counts = apply_failures(groups, self._config.reward, budget)
        self._count(counts)
        if Need.GREEDY_BASELINE in self._run.advantage_algorithm.needs:
            tasks = [pending.task for pending in taken]
            kept = await with_greedy_baselines(self._run, tasks, kept, self._metrics, greedy, self.timeline)
            for pending in taken:
                pending.ready_at = now()
        return kept

    async def _first_ready(self) -> AsyncGenerator[list[Group], None]:
        """Yields the groups of each mini-batch, in the order in which their rewards arrive."""
        prompts = self._num_prompts()
        size = self._config.actor.minibatch_prompts or prompts
        budget = self._budget(self._config.rollout.samples_per_prompt)
        waiting: list[tuple[int, Group]] = []
        for left in reversed(range(prompts)):
            issued = await self._next(now())
            group = issued.group()
            kept, counts = apply_failures([group], self._config.reward, budget)
            self._count(counts)
            waiting += [(issued.number, trajectory) for trajectory in kept]
            if waiting and (len(waiting) == size or not left):
                yield [waiter for _, waiter in sorted(waiting, key=lambda pair: pair[0])]
                waiting.clear()

    async def _next(self, began: float) -> PendingGroup:
        """The next ready prompt of a wait that began then; an error if it was sampled with weights that are too old."""
        issued = await self._buffer.next_ready(self._step)
        self.timeline.waited(began, issued.sampled_at)
        self.taken.append(issued)
        for row in issued.trajectories.values():
            versions, staleness = row.versions, self._staleness_of(row.versions)
            newest = versions[0][1] if len(versions) == 1 else max([of for _, of in versions], default=0)
            if newest >= self._step:
                agent = owner_of(self._run.plan.components["agent"])
                raise PluginError(
                    f"{agent}: rollout(): trajectory {row.id} has tokens of version {newest} of the weights, the "
                    f"newest is {self._step - 1}; needs the versions of its completions"
                )
            if staleness > self._schedule.max_staleness:
                raise WorkerError(
                    f"rollout: trajectory {row.id} was sampled with version {self._step - 1 - staleness} of the "
                    f"weights, the step begins with version {self._step - 1}; schedule.max_staleness="
                    f"{self._schedule.max_staleness} allows no more; were the new weights handed over?"
                )
        return issued

    async def _finish(self, groups: Sequence[Group], index: int) -> Batch:
        """The groups, of mini-batch `index`, as a batch with everything that the update needs but weights."""
        run, config = self._run, self._config
        rows = [row for group in groups for row in group]
        ids, batch = self._arrays.collated(groups)  # while the started passes run
        if self._preparing is not None:
            await self._preparing
        if not rows:  # all samples were dropped: passes computed nothing that an estimator or a KL term could use
            self.batches.append((ids, batch))
            return batch
        await self._arrays.ensure([row.trajectory for row in rows])
        batch = self._arrays.attach(batch, ids)
        if self._schedule.max_staleness:
            mixed = config.rollout.on_new_weights == "continue"  # keys and values of an older version differ from ours
            same_BT = sampled_with([row.trajectory for row in rows], self._step - 1, alone=mixed)
            batch = replace(batch, same_weights_BT=same_BT)
        per_token, max_tokens = run.advantage_algorithm.per_token, config.rollout.max_tokens
        scores = self._function_scores(rows, ids)
        batch, metrics = with_advantages(batch, run.advantage, per_token, config.algo, max_tokens, self._kl, scores)
        self.advantages |= zip(ids, row_advantages(batch), strict=True)
        if config.algo.top_entropy_quantile < 1.0:
            batch, chosen = only_top_entropy(batch, config.algo)
            metrics |= chosen
        self.batches.append((ids, batch))
        self._prepared.append(metrics)
        self._trained += [(index, row) for row in rows]
        return replace(batch, entropy_BT=None)  # recorded, and not sent with every mini-batch

    def _function_scores(self, rows: Sequence[ScoredTrajectory], ids: Sequence[TrajectoryId]) -> FunctionScores | None:
        """Those of the rows with these ids, in their order; None if the estimator needs none."""
        if Need.FUNCTION_SCORES not in self._run.advantage_algorithm.needs:
            return None
        by_id = {row.trajectory.id: row for row in rows}
        return function_scores([by_id[row] for row in ids], self._run.reward.weights)

    def _count(self, counts: Metrics) -> None:
        for name, value in counts.items():
            self._metrics[name] = self._metrics.get(name, 0.0) + value

    def _staleness_of(self, versions: Sequence[tuple[int, int]]) -> int:
        """Versions between the weights that the step begins with and the oldest that sampled a token."""
        oldest = versions[0][1] if len(versions) == 1 else min([of for _, of in versions], default=self._step - 1)
        return self._step - 1 - oldest

    def _staleness(self) -> Metrics:
        stale = [self._staleness_of(row.trajectory.versions) for _, row in self._trained] or [0]
        metrics = {"schedule/staleness_mean": sum(stale) / len(stale), "schedule/staleness_max": float(max(stale))}
        if self._schedule.stream:
            indices = [index for index, _ in self._trained]
            lengths = [row.trajectory.num_sampled for _, row in self._trained]
            metrics["schedule/length_correlation"] = length_correlation(indices, lengths)
        return metrics


def _with_score(failed: ScoredTrajectory, rewards: Mapping[TrajectoryId, Reward]) -> ScoredTrajectory:
    """The trajectory with the score and the components that it was trained with, if it was."""
    trained = rewards.get(failed.trajectory.id)
    return failed if trained is None else replace(failed, reward=replace(trained, status=failed.reward.status))


def _records(step: int, rows: Sequence[tuple[ScoredTrajectory, float | None]]) -> tuple[bytes, StepFacts]:
    return trajectory_lines(rows, Lane.TRAIN), step_facts(step, rows)
