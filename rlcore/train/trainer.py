"""The training loop: `Trainer.step` is one step, `Trainer.train` the run."""

import asyncio
import gc
import logging
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

from rlcore_view import Watch

from rlcore.algo.kl import FixedKl
from rlcore.contracts.activity import EndedWork, current_activity
from rlcore.data import IssuedPrompts
from rlcore.errors import CheckpointError, shown
from rlcore.report.metrics import MetricsLog, TrajectoryLog, average, trajectory_lines
from rlcore.report.terminal import Terminal
from rlcore.report.token_log import StepTokens, TokenLog
from rlcore.report.trace import TraceLog
from rlcore.report.tracked_samples import tracked_samples
from rlcore.report.trackers import Trackers
from rlcore.runtime.launch import Runtime
from rlcore.train.buffer import RolloutBuffer, issuing
from rlcore.train.evaluate import evaluate
from rlcore.train.pending import sample_spans
from rlcore.train.step_batcher import StepBatcher
from rlcore.train.timing import StepTimeline
from rlcore.train.updates import Updates
from rlcore.types import Batch, Lane, Metrics, Prompt, ScoredTrajectory, plain

logger = logging.getLogger(__name__)

QUIET_THRESHOLDS = (1_000_000, 10, 10)
"""Thresholds of Python's garbage collector during training; steps collect during an update (`RolloutBuffer.tidy`)."""


@dataclass(frozen=True)
class Sinks:
    """The outputs for a run's numbers."""

    metrics: MetricsLog
    trajectories: TrajectoryLog
    tokens: TokenLog
    trace: TraceLog
    trackers: Trackers
    terminal: Terminal

    def record(self, step: int, metrics: Metrics) -> None:
        """To metrics.jsonl and to every tracker."""
        self.metrics.append(step, metrics)
        self.trackers.log(step, metrics)

    def cut_back(self, step: int, evaluated: bool = True) -> None:
        """Drop what a run that is resumed after the step writes again; `evaluated`: its state has the evaluation."""
        self.metrics.cut_back(step, evaluated)
        self.trajectories.cut_back(step, evaluated)
        self.tokens.cut_back(step, evaluated)
        self.trace.cut_back(step)

    def write(self, step: int, lines: bytes, found: StepTokens, ended: EndedWork) -> None:
        """The records of a training step: its trajectories, their tokens and the work that has ended."""
        self.trajectories.append(step, lines)
        self.tokens.write(step, Lane.TRAIN, found)
        self.trace.write(step, ended)


@dataclass
class Progress:
    """The state of a run between two steps; a checkpoint keeps all of it."""

    step: int
    """Published steps; also the version of the weights."""
    order: IssuedPrompts
    kl: FixedKl
    equal_steps: int = 0
    """Steps in a row in which every group's rewards were equal."""


class Trainer:
    """Takes training steps and keeps the run's progress."""

    def __init__(
        self,
        run: Runtime,
        progress: Progress,
        last_step: int,
        heldout: Mapping[str, Sequence[Prompt]],
        sinks: Sinks,
    ) -> None:
        self.run, self.progress, self.heldout, self.sinks = run, progress, heldout, sinks
        self.config, self.last_step = run.plan.config, last_step
        self.actor = run.actor.replicas[0]
        self.buffer = RolloutBuffer(run.agent, run.reward, progress.order, issuing(run))
        self.updating = False
        """True from a step's first update until its weights are published, while they do not belong to any step."""
        self.history: deque[Metrics] = deque(maxlen=1000)
        """The metrics of the last steps of this process, for the advice on the schedule at the end."""
        self.watch = Watch(plain(run.plan.loaded.saved))
        """Finds reasons why nothing is learned."""
        self.allowed: Counter[bool] = Counter()
        """See `Updates.allowed`; of all steps of this process."""
        self.evaluations: list[tuple[int, Metrics]] = []
        self._writing: asyncio.Task[None] | None = None
        self._activity = current_activity()
        self.published: dict[str, Any] = {}
        """`state` after the last published step; empty before `start`."""
        self._thresholds: tuple[int, int, int] | None = None
        """Thresholds of the garbage collector before `start`."""

    def start(self) -> None:
        """Prepare for the first step; `close` undoes it."""
        self.published = self.state()
        self._activity.counts = lambda: self.buffer.counts(self.progress.step + 1)
        # A step makes hundreds of small objects per sample, hardly any of them cyclic: looking through them, and
        # through the libraries' own, again and again would take a third of the controller's time.
        self._thresholds = gc.get_threshold()
        gc.freeze()
        gc.set_threshold(*QUIET_THRESHOLDS)

    async def step(self) -> None:
        """One training step: from prompts over trajectories, groups and mini-batches to weights, a line each."""
        work = StepBatcher(self.run, self.buffer, self.progress.kl, self.progress.step + 1, self.last_step)
        async with work:
            self._activity.begin_step(self.progress.step + 1)
            prompts = work.issue_prompts()
            trajectories = await work.sampled_trajectories(prompts)
            self._activity.enter("scoring")
            work.begin_passes(trajectories)  # log-probs and values, while rewards are pending
            groups = work.scored_groups()
            updating = Updates(self.run, self.last_step - self.progress.step)
            async with aclosing(work.minibatches(groups)) as minibatches, updating as updates:
                updated = average([await self.update(batch, updates, work.timeline) async for batch in minibatches])
            self.allowed += updating.allowed
            measured = await self.publish_weights(work)
        found = updated | measured  # a KL penalty in the reward has its policy/kl, of all tokens under pi_old
        await self.record(work, found | self.run.take_metrics(found))

    async def update(self, minibatch: Batch, updates: Updates, timeline: StepTimeline) -> Metrics:
        """One optimizer step, of actor and critic alike."""
        if not self.updating:
            self._activity.enter("updating")
            await asyncio.sleep(0)  # a signal that has come ends the run while its weights are whole
            logger.info("step %d: updating on %d rows first", self.progress.step + 1, len(minibatch))
        self.updating = True
        with timeline.updating():
            metrics = await updates.update(minibatch)
        self._activity.updated += 1
        return metrics

    async def publish_weights(self, work: StepBatcher) -> Metrics:
        """Publish the new weights, which completes the step. Returns the metrics of its samples."""
        progress = self.progress
        self._activity.enter("handing over weights")
        if self.run.plan.schedule.sample_before_publish:
            await self.buffer.sampled()
        await self.run.publish(progress.step + 1)
        progress.step += 1
        self.buffer.published(progress.step, work.taken)
        measured = work.end()
        all_equal = measured.get("reward/zero_std_frac") == 1.0
        progress.equal_steps = progress.equal_steps + 1 if all_equal else 0
        self.published = self.state()
        self.updating = False
        self._activity.end_later(partial(sample_spans, list(work.taken)))
        self._activity.end_step()
        return measured

    async def record(self, work: StepBatcher, metrics: Metrics) -> None:
        """Metrics, trajectories and what the terminal shows of the step just taken.

        The file of trajectories is written while the next step begins to sample; `written` waits for that.
        """
        await self.written()
        lines, facts = await work.records()
        step, train = self.progress.step, self.config.train
        metrics["reward/equal_steps"] = float(self.progress.equal_steps)
        if self.run.plan.schedule.drop:
            metrics["data/given_up"] = float(self.buffer.num_discarded)
        self.history.append(metrics)
        rows = [scored.trajectory for scored in work.everything]
        self.sinks.tokens.learn(rows)
        writing = asyncio.to_thread(
            self.sinks.write, step, lines, StepTokens(rows, work.batches), self._activity.take()
        )
        self._writing = asyncio.create_task(writing, name=f"trajectories of step {step}")
        self.sinks.record(step, metrics)
        self.sinks.terminal.step(step, metrics)
        if train.log_completions_every and (step == 1 or step % train.log_completions_every == 0):
            shown = work.outcomes()
            stride = max(
                1, len(shown) // max(1, train.log_completions)
            )  # of different prompts, where there are several
            chosen = shown[::stride][: train.log_completions]
            self.sinks.terminal.completions(step, chosen)
            self.sinks.trackers.log_samples(step, tracked_samples(chosen))
        for finding in self.watch.step(facts.with_metrics(metrics)):
            self.sinks.terminal.warn(f"step {step}: {finding.words}")
        self.published |= {"watch": self.watch.state()}

    async def written(self) -> None:
        """Wait until the trajectories of every step taken are on disk; raises the error of a failed write, to each that
        waits for it.
        """
        if (writing := self._writing) is None:
            return
        try:
            await asyncio.shield(writing)
        finally:
            if writing.done() and self._writing is writing:
                self._writing = None

    async def close(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        """Cancel the work in flight; the ledger stays unchanged, for a checkpoint.

        Behind an error of the run, or a signal, records that cannot be written are logged: the error is the cause, and
        a checkpoint may still be written on the signal.
        """
        if self._thresholds is not None:
            gc.set_threshold(*self._thresholds)
            gc.unfreeze()
            self._thresholds = None
        await self.buffer.close()
        try:
            await self.written()
        except CheckpointError as problem:
            if error is None:
                raise
            logger.warning("%s", problem)
        try:
            self.sinks.trace.write(self.progress.step, self._activity.take())
        except CheckpointError as problem:  # what ended the run is the error to tell
            logger.warning("%s", problem)

    async def evaluate(self) -> None:
        """Score held-out prompts with the current weights; the training state does not change."""
        step = self.progress.step
        self.sinks.terminal.phase("evaluating")
        result = await evaluate(self.run, self.heldout, self.config.train.seed)
        await self.written()
        self.sinks.trajectories.append(step, trajectory_lines([(row, None) for row in result.rows], Lane.EVAL))
        evaluated = StepTokens([row.trajectory for row in result.rows])
        self.sinks.tokens.learn(evaluated.rows)
        self.sinks.tokens.write(step, Lane.EVAL, evaluated)
        self.sinks.record(step, result.metrics)
        logger.info("evaluated after step %d", step)
        self.sinks.terminal.evaluated(step, result.metrics)
        self.evaluations.append((step, result.metrics))

    def evaluated(self, step: int) -> bool:
        """True if the weights of `step` were evaluated."""
        return any(done == step for done, _ in self.evaluations)

    def state(self) -> dict[str, Any]:
        """The run between two steps, as JSON."""
        return {
            "step": self.progress.step,
            "equal_steps": self.progress.equal_steps,
            "kl": self.progress.kl.state(),
            "critic": self.run.critic.state(),
            "evaluations": self.evaluations,
            "watch": self.watch.state(),
            **self._buffer_state(),
        }

    def _buffer_state(self) -> dict[str, Any]:
        return {
            "order": self.progress.order.state(),
            "in_flight": self.buffer.state(),
            "retired": self.buffer.num_retired,
            "discarded": self.buffer.num_discarded,
            "agent": self.run.agent.state(),
            "reward": self.run.reward.state(),
        }

    def snapshot(self) -> tuple[dict[str, Any], list[ScoredTrajectory]]:
        """The state that checkpoints keep between updates: the published step, and the samples in flight.

        On-policy, samples in flight belong to the current step, which starts again.
        """
        if self.run.plan.schedule.max_staleness == 0:
            return self.published, []
        return self.published | self._buffer_state(), self.buffer.scored()

    def restore(self, state: dict[str, Any], scored: Sequence[ScoredTrajectory]) -> None:
        """Continue from the state that `snapshot` returned; ValueError for a count that is not a whole number."""
        self.progress.step, self.progress.equal_steps = _count(state, "step"), _count(state, "equal_steps")
        self.progress.order.restore(state["order"])
        self.progress.kl.restore(state["kl"])
        self.buffer.restore(self.progress.step, state.get("in_flight", []), scored)
        self.buffer.num_retired = _count({"retired": 0, **state}, "retired")
        self.buffer.num_discarded = _count({"discarded": 0, **state}, "discarded")
        self.run.agent.restore(state["agent"])
        self.run.reward.restore(state["reward"])
        self.run.critic.restore_state(state["critic"])
        self.evaluations = [(_count({"evaluations": step}, "evaluations"), dict(m)) for step, m in state["evaluations"]]
        self.watch.restore(state["watch"])
        self.published = self.state()


def _count(state: Mapping[str, Any], name: str) -> int:
    value = state[name]
    if type(value) is not int or value < 0:
        raise ValueError(f"'{name}' is {shown(value)}; needs a whole number")
    return value
