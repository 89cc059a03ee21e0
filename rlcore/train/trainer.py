"""The training loop: `Trainer.step` is one step, `Trainer.train` the run."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlcore.actor import ActorWorker
from rlcore.algo.kl import FixedKl
from rlcore.data import PromptOrder
from rlcore.evaluate import evaluate
from rlcore.launch import Run
from rlcore.metrics import MetricsLog, TrajectoryLog, average
from rlcore.schedule.prepare import epoch_minibatches, prepare
from rlcore.schedule.sample import Sampled, sample_groups
from rlcore.terminal import Terminal
from rlcore.track import Trackers
from rlcore.types import Batch, Lane, Metrics, Prompt

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sinks:
    """Where a run's numbers go."""

    metrics: MetricsLog
    trajectories: TrajectoryLog
    trackers: Trackers
    terminal: Terminal

    def record(self, step: int, metrics: Metrics) -> None:
        """To metrics.jsonl and to every tracker."""
        self.metrics.append(step, metrics)
        self.trackers.log(step, metrics)


@dataclass
class Progress:
    """Where a run stands between two steps; a checkpoint keeps all of it."""

    step: int
    """Published steps; also the version of the weights."""
    order: PromptOrder
    kl: FixedKl
    equal_steps: int = 0
    """Steps in a row in which every group's rewards were equal."""


class Trainer:
    """Takes training steps and keeps where the run stands."""

    def __init__(self, run: Run, progress: Progress, heldout: Mapping[str, Sequence[Prompt]], sinks: Sinks) -> None:
        self.run, self.progress, self.heldout, self.sinks = run, progress, heldout, sinks
        self.config = run.plan.config
        self.actor = run.actor.replicas[0]
        self.updating = False
        """True from a step's first update until its weights are published: the weights belong to no step."""
        self.evaluations: list[tuple[int, Metrics]] = []
        self.published = self.state()

    async def step(self) -> None:
        """One training step; every arrow of the data flow is one line."""
        clock = Clock()
        sampled = await sample_groups(self.run, self.progress.order)
        batch, prepared = await prepare(self.run, sampled.groups, self.progress.kl)
        clock.mark("time/sample_s")
        updated = await self.update(batch)
        await self.publish(sampled)
        clock.mark("time/update_s")
        self.record(sampled, batch, sampled.metrics | prepared | updated | self.run.take_metrics() | clock.seconds)

    async def update(self, batch: Batch) -> Metrics:
        """Train on every mini-batch of every epoch, actor and critic alike; metrics are means over the updates."""
        self.updating = True
        logger.info("step %d: updating on %d rows", self.progress.step + 1, len(batch))
        updates: list[Metrics] = []
        for epoch in range(self.config.actor.epochs):
            for minibatch in epoch_minibatches(self.run, batch, self.progress.step, epoch):
                updates.append(await self.run.critic.update(minibatch))
                if self.run.critic.actor_may_update():
                    updates[-1] |= await self.actor.call(ActorWorker.update, minibatch)
        return average(updates)

    async def publish(self, sampled: Sampled) -> None:
        """Name the new weights: from here on the step has been taken."""
        progress = self.progress
        await self.actor.call(ActorWorker.publish, progress.step + 1)
        progress.step += 1
        all_equal = sampled.metrics.get("reward/zero_std_frac") == 1.0
        progress.equal_steps = progress.equal_steps + 1 if all_equal else 0
        self.published = self.state()
        self.updating = False

    def record(self, sampled: Sampled, batch: Batch, metrics: Metrics) -> None:
        """Metrics, trajectories and what the terminal shows of the step just taken."""
        step, algo, train = self.progress.step, self.config.algo, self.config.train
        metrics["reward/equal_steps"] = float(self.progress.equal_steps)
        advantages = dict(zip(sampled.rows(), row_advantages(batch), strict=True))
        rows = [(scored, advantages.get(scored.trajectory.id)) for scored in sampled.everything]
        self.sinks.trajectories.append(step, rows, Lane.TRAIN)
        self.sinks.record(step, metrics)
        self.sinks.terminal.step(step, metrics)
        if train.log_completions_every and (step == 1 or step % train.log_completions_every == 0):
            stride = max(1, len(rows) // max(1, train.log_completions))  # of different prompts, where there are several
            self.sinks.terminal.completions(step, rows[::stride][: train.log_completions])
        if algo.equal_rewards_warn_steps and self.progress.equal_steps >= algo.equal_rewards_warn_steps:
            self.sinks.terminal.warn(
                f"in each of the last {self.progress.equal_steps} steps all rewards of every group were equal: "
                "nothing is learned; look at the completions and at the reward function"
            )

    async def evaluate(self) -> None:
        """Score held-out prompts with the weights as they are; training state stays as it is."""
        step = self.progress.step
        self.sinks.terminal.phase("evaluating")
        result = await evaluate(self.run, self.heldout, self.config.train.seed)
        self.sinks.trajectories.append(step, [(scored, None) for scored in result.rows], Lane.EVAL)
        self.sinks.record(step, result.metrics)
        logger.info("evaluated after step %d", step)
        self.sinks.terminal.evaluated(step, result.metrics)
        self.evaluations.append((step, result.metrics))

    def evaluated(self, step: int) -> bool:
        """Whether the weights of `step` were evaluated."""
        return any(done == step for done, _ in self.evaluations)

    def state(self) -> dict[str, Any]:
        """The run between two steps, as JSON."""
        return {
            "step": self.progress.step,
            "equal_steps": self.progress.equal_steps,
            "order": self.progress.order.state(),
            "kl": self.progress.kl.state(),
            "agent": self.run.agent.state(),
            "reward": self.run.reward.state(),
            "critic": self.run.critic.state(),
            "evaluations": self.evaluations,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take up what `state` returned."""
        self.progress.step, self.progress.equal_steps = state["step"], state["equal_steps"]
        self.progress.order.restore(state["order"])
        self.progress.kl.restore(state["kl"])
        self.run.agent.restore(state["agent"])
        self.run.reward.restore(state["reward"])
        self.run.critic.restore_state(state["critic"])
        self.evaluations = [(step, metrics) for step, metrics in state["evaluations"]]
        self.published = self.state()


@dataclass
class Clock:
    """Seconds of the phases of a step, wall time, by metric name."""

    began: float = field(default_factory=time.monotonic)
    seconds: Metrics = field(default_factory=dict)

    def mark(self, name: str) -> None:
        """The phase `name` ends now; it began when the one before it ended."""
        now = time.monotonic()
        self.seconds[name] = now - self.began - sum(v for k, v in self.seconds.items() if k != "time/step_s")
        self.seconds["time/step_s"] = now - self.began


def row_advantages(batch: Batch) -> list[float]:
    """One advantage a row: the estimator's, or the mean over the row's sampled tokens if it gives one a token."""
    if batch.advantages_B is not None:
        return [float(value) for value in batch.advantages_B]
    if batch.advantages is None:
        return [0.0] * len(batch)
    sums = (batch.advantages.get() * batch.tokens.get().loss_mask_BT).sum(axis=1)
    return [float(value) for value in sums / np.maximum(batch.num_sampled_B, 1)]
