"""Runs whose samples and rewards a test holds back, and a record of their events in order.

A test can state "this begins before that" without timings. It holds the later event back until the record has the
earlier one. A trainer that waits for the later event first never ends its step, and `play` raises within seconds.
"""

import asyncio
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from rlcore.algo.kl import kl_controller
from rlcore.contracts.agents import AgentLoop, RolloutTask
from rlcore.contracts.critic import CriticEngine
from rlcore.contracts.offers import Scope
from rlcore.contracts.reward_manager import RewardManager
from rlcore.plan import RunPlan
from rlcore.plugins.planning import plan_run
from rlcore.report.metrics import MetricsLog, TrajectoryLog
from rlcore.report.terminal import Terminal
from rlcore.report.token_log import TokenLog
from rlcore.report.trace import TraceLog
from rlcore.report.trackers import Trackers
from rlcore.runtime.launch import Runtime, launch
from rlcore.testing.prompts import seeded_prompts
from rlcore.testing.runs import run_settings
from rlcore.train.run_prompts import load_data
from rlcore.train.trainer import Progress, Sinks, Trainer
from rlcore.types import Batch, Float32s, Lane, Metrics, Prompt, Reward, Sampling, ScoredTrajectory, Trajectory

PROMPTS, SAMPLES = 3, 2
NUM = PROMPTS * SAMPLES
"""Samples of a step."""
LIMIT_S = 15.0
"""Timeout of a run: one that takes longer has stalled."""
QUIET_S = 0.15
"""Seconds without an event after which everything that could begin has begun."""


class Event(NamedTuple):
    """One event of a run.

    A sample has 'sampled' (the agent loop has it), 'asked' (the reward manager has it) and 'scored'. A pass over
    prompts has 'issued'. A step has 'reference', 'logprobs' and 'values', each also with ' done', and 'updating',
    'updated' and 'published'. An evaluation has 'evaluated'.
    """

    what: str
    step: int
    """Number of the step, or of the pass that issued the sample, from 1; 0 for evaluations."""
    prompt: int = -1
    """Index of the sample's prompt in its pass."""
    sample: int = -1


Hold = Callable[["Events", Event], Awaitable[None]]
"""Waits until the next event may happen."""


class Events:
    """The events so far, in order."""

    def __init__(self) -> None:
        self.seen: list[Event] = []
        self.minibatches: list[Batch] = []
        """The mini-batch of every update."""
        self.where: dict[tuple[str, int], tuple[int, int]] = {}
        """(prompt, epoch) -> (pass, index of the prompt in it); pass 0 for evaluations."""
        self.trainer: Trainer
        self._changed = asyncio.Event()

    def note(self, event: Event) -> None:
        """Record an event."""
        self.seen.append(event)
        self._changed.set()

    def count(self, what: str, step: int | None = None) -> int:
        """The number of such events so far, in that step or in any."""
        return sum(event.what == what and step in (None, event.step) for event in self.seen)

    def places(self, what: str, step: int | None = None) -> list[int]:
        """Indices of such events in the record, in that step or in any."""
        return [at for at, event in enumerate(self.seen) if event.what == what and step in (None, event.step)]

    async def until(self, what: str, step: int | None = None, count: int = 1) -> None:
        """Wait until that many such events have happened."""
        while self.count(what, step) < count:
            self._changed.clear()
            await self._changed.wait()

    async def quiet(self) -> None:
        """Wait until no more events come."""
        known = -1
        while known < len(self.seen):
            known = len(self.seen)
            await asyncio.sleep(QUIET_S)


async def at_once(events: Events, event: Event) -> None:
    """A hold that delays nothing."""


def chance(trajectory: Trajectory) -> Reward:
    """A score between 0 and 1 that follows from the trajectory's id."""
    return Reward(zlib.crc32(repr(trajectory.id).encode()) / 2**32)


@dataclass(frozen=True)
class Script:
    """The holds on samples and rewards, and the rewards themselves."""

    sample: Hold = at_once
    """Awaited before the trainer gets a finished sample. Later samples of the same pass wait, too."""
    reward: Hold = at_once
    """Awaited before the trainer gets a sample's reward. Other rewards may overtake it."""
    score: Callable[[Trajectory], Reward] = chance
    evaluate_after: int = 0
    """Evaluate after this step; 0: never."""


async def play(plan: RunPlan, directory: Path, script: Script, steps: int, last_step: int | None = None) -> Events:
    """Take `steps` training steps of a run whose last one is `last_step`, under a script.

    TimeoutError with the last events when the run stalls.
    """
    events = Events()
    async with launch(plan, directory) as run:
        watched = _watched(run, events, script)
        prompts, heldout = load_data(plan.config)
        progress = Progress(
            0, seeded_prompts(prompts, {}, plan.config.train.seed, True), kl_controller(plan.config.algo.kl)
        )
        with (directory / "terminal").open("w") as file:
            terminal = Terminal(Console(file=file))
            trackers = Trackers((), "rlcore", directory, "", warn=terminal.warn)
            sinks = Sinks(
                MetricsLog(directory),
                TrajectoryLog(directory),
                TokenLog(directory, "none", run.tokens),
                TraceLog(directory, 0.0),
                trackers,
                terminal,
            )
            trainer = events.trainer = _Trainer(watched, progress, last_step or steps, heldout, sinks, events)
            try:
                async with asyncio.timeout(LIMIT_S):
                    while progress.step < steps:
                        await trainer.step()
                        if progress.step == script.evaluate_after:
                            await trainer.evaluate()
                            events.note(Event("evaluated", 0))
            except TimeoutError as cause:
                raise TimeoutError(f"the run has come to a halt after {events.seen[-12:]}") from cause
            finally:
                await trainer.close()
    return events


def played(
    directory: Path, script: Script, steps: int, *settings: dict[str, Any], last_step: int | None = None
) -> Events:
    """Runs `play` with mini-batches of one prompt, on the null model by default."""
    directory.mkdir(exist_ok=True)
    more: dict[str, Any] = {
        "rollout.samples_per_prompt": SAMPLES,
        "train.prompts_per_step": PROMPTS,
        "actor.minibatch_prompts": 1,
        "train.log_completions_every": 0,
    }
    for setting in settings:
        more |= setting
    overrides = [f"{key}={value}" for key, value in run_settings(directory, 30, **more).items()]
    plugins = {"null", *(key.split(".")[1] for key in more if key.startswith("plugins."))}
    return asyncio.run(play(plan_run([], overrides, sorted(plugins)), directory, script, steps, last_step))


def _watched(run: Runtime, events: Events, script: Script) -> Runtime:
    """The run, with a script that controls its agent loop and reward manager, and a record of its models' calls."""
    agent = _Agent(run.agent, events, script)
    actor: Any = _Group(run.actor.replicas, events)
    reference: Any = run.reference and _Group(run.reference.replicas, events)
    return replace(
        run,
        agent=agent,
        reward=_Rewards(agent, events, script),
        critic=_Critic(run.critic, events),
        actor=actor,
        reference=reference,
    )


class _Trainer(Trainer):
    def __init__(
        self,
        run: Runtime,
        progress: Progress,
        last: int,
        heldout: Mapping[str, Sequence[Prompt]],
        sinks: Sinks,
        events: Events,
    ) -> None:
        super().__init__(run, progress, last, heldout, sinks)
        self.events = events

    async def update(self, minibatch: Batch, *args: Any) -> Metrics:
        step = self.progress.step + 1
        self.events.minibatches.append(minibatch)
        self.events.note(Event("updating", step))
        metrics = await super().update(minibatch, *args)
        self.events.note(Event("updated", step))
        return metrics

    async def publish_weights(self, *args: Any) -> Metrics:
        metrics = await super().publish_weights(*args)
        self.events.note(Event("published", self.progress.step))
        return metrics


class _Agent(AgentLoop):
    def __init__(self, inner: AgentLoop, events: Events, script: Script) -> None:
        self.inner, self.events, self.script = inner, events, script
        self.num_passes = 0

    def event(self, what: str, row: Trajectory) -> Event:
        return Event(what, *self.events.where[row.id.prompt, row.id.epoch], row.id.sample)

    async def rollout(self, tasks: Sequence[RolloutTask], sampling: Sampling, lane: Lane) -> AsyncIterator[Trajectory]:
        number = 0
        if lane is Lane.TRAIN:
            self.num_passes = number = self.num_passes + 1
        self.events.where |= {(task.prompt.id, task.epoch): (number, place) for place, task in enumerate(tasks)}
        self.events.note(Event("issued", number))
        async with aclosing(self.inner.rollout(tasks, sampling, lane)) as rows:  # type: ignore[type-var]
            async for row in rows:
                await self.script.sample(self.events, event := self.event("sampled", row))
                self.events.note(event)
                yield row


class _Rewards(RewardManager):
    def __init__(self, agent: _Agent, events: Events, script: Script) -> None:
        self.agent, self.events, self.script = agent, events, script

    @property
    def scope(self) -> Scope:
        return Scope.SAMPLE

    async def score(self, stream: AsyncIterator[Trajectory], lane: Lane) -> AsyncIterator[ScoredTrajectory]:
        done: asyncio.Queue[ScoredTrajectory | None] = asyncio.Queue()

        async def judge(row: Trajectory) -> None:
            await self.script.reward(self.events, event := self.agent.event("scored", row))
            self.events.note(event)
            done.put_nowait(ScoredTrajectory(row, self.script.score(row)))

        async def read() -> None:
            try:
                async with asyncio.TaskGroup() as group:
                    async for row in stream:
                        self.events.note(self.agent.event("asked", row))
                        group.create_task(judge(row))
            finally:
                done.put_nowait(None)

        reading = asyncio.create_task(read())
        try:
            while (scored := await done.get()) is not None:
                yield scored
            await reading
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


class _Critic(CriticEngine):
    def __init__(self, inner: CriticEngine, events: Events) -> None:
        self.inner, self.events = inner, events

    async def values(self, batch: Batch) -> Float32s | None:
        step = self.events.trainer.progress.step + 1
        self.events.note(Event("values", step))
        found = await self.inner.values(batch)
        self.events.note(Event("values done", step))
        return found

    async def update(self, minibatch: Batch) -> Metrics:
        return await self.inner.update(minibatch)

    def actor_may_update(self) -> bool:
        return self.inner.actor_may_update()


class _Group:
    """Replicas whose forward passes are recorded."""

    def __init__(self, replicas: Sequence[Any], events: Events) -> None:
        self.replicas: Any = [_Replica(replica, events) for replica in replicas]


class _Replica:
    def __init__(self, inner: Any, events: Events) -> None:
        self.inner, self.events = inner, events

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if method.__name__ not in ("logprobs", "token_scores"):
            return await self.inner.call(method, *args, **kwargs)
        what = "reference" if "Reference" in method.__qualname__ else "logprobs"
        step = self.events.trainer.progress.step + 1
        self.events.note(Event(what, step))
        found = await self.inner.call(method, *args, **kwargs)
        self.events.note(Event(f"{what} done", step))
        return found
