"""Schedules under chance and interruption: 500 random ones on a virtual clock (case 29), signals and kills (32, 34)."""

import asyncio
import random
import selectors
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from forked_runs import ForkedRun, fork_run
from rich.console import Console

from rlcore.algo.kl import FixedKl
from rlcore.contracts.agents import AgentLoop, RolloutTask
from rlcore.contracts.components import BuildContext, Component
from rlcore.contracts.hooks import hookimpl
from rlcore.contracts.reward_manager import RewardManager
from rlcore.plugins.planning import plan_run
from rlcore.report.metrics import MetricsLog, TrajectoryLog, read_trajectories
from rlcore.report.terminal import Terminal
from rlcore.report.token_log import TokenLog
from rlcore.report.trace import TraceLog
from rlcore.report.trackers import Trackers
from rlcore.runtime.launch import Runtime, launch
from rlcore.testing import write_prompts
from rlcore.testing.prompts import seeded_prompts
from rlcore.train.trainer import Progress, Sinks, Trainer
from rlcore.types import Lane, Prompt, Reward, RewardStatus, Sampling, ScoredTrajectory, Trajectory

pytestmark = [pytest.mark.fault, pytest.mark.timeout(540)]

RLCORE_API = "1"
"""This file is a plugin, too: an agent loop and a reward manager that take as long as chance says."""


class SlowAgent(AgentLoop):
    """Single turns that end in any order, after any time."""

    def __init__(self, inner: AgentLoop) -> None:
        self.inner = inner
        self.chance = random.Random(0)
        self.sampling: set[Trajectory] = set()
        """Finished by the generator, not yet here."""

    async def rollout(self, tasks: Sequence[RolloutTask], sampling: Sampling, lane: Lane) -> AsyncIterator[Trajectory]:
        async with aclosing(self.inner.rollout(tasks, sampling, lane)) as rows:  # type: ignore[type-var]
            found = [row async for row in rows]
        self.chance.shuffle(found)
        self.sampling.update(found)
        try:
            for row in found:
                await asyncio.sleep(self.chance.choice((0.0, 0.1, 1.0)) * self.chance.random())
                self.sampling.discard(row)
                yield row
        finally:
            self.sampling.difference_update(found)


class SlowRewards(RewardManager):
    """Rewards that come in any order, after any time; one in fifty fails."""

    chance = random.Random(0)

    async def score(self, stream: AsyncIterator[Trajectory], lane: Lane) -> AsyncIterator[ScoredTrajectory]:
        done: asyncio.Queue[ScoredTrajectory | None] = asyncio.Queue()

        async def judge(row: Trajectory, seconds: float) -> None:
            await asyncio.sleep(seconds)
            failed = Reward(0.0, status=RewardStatus.FAILED)
            done.put_nowait(
                ScoredTrajectory(row, failed if self.chance.random() < 0.02 else Reward(self.chance.random()))
            )

        async def read() -> None:
            try:
                async with asyncio.TaskGroup() as group:
                    async for row in stream:
                        group.create_task(judge(row, self.chance.choice((0.0, 1.0, 10.0)) * self.chance.random()))
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


def build_agent(context: BuildContext) -> AgentLoop:
    """The core's own loop, slowed down."""
    from rlcore.agents.single_turn import build_single_turn

    return SlowAgent(build_single_turn(context))


@hookimpl
def rlcore_agent_loops() -> Sequence[Component[AgentLoop]]:
    return [Component("slow", build_agent)]


@hookimpl
def rlcore_reward_managers() -> Sequence[Component[RewardManager]]:
    return [Component("slow", lambda context: SlowRewards(), uses_reward_functions=True)]


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose clock jumps to the next timer when nothing happens; what threads do takes no time on it."""

    def __init__(self) -> None:
        self.clock, self.idle_s = 0.0, 0.0
        real = selectors.DefaultSelector()
        super().__init__(_Jumping(real, self))

    def time(self) -> float:
        return self.clock


class _Jumping(selectors.BaseSelector):
    def __init__(self, real: selectors.BaseSelector, loop: VirtualLoop) -> None:
        self._real, self._loop = real, loop

    def select(self, timeout: float | None = None) -> Any:
        short = timeout is not None and timeout < 100.0  # longer ones are deadlines
        events = self._real.select(0.0 if timeout is not None and timeout <= 0 else 0.002 if short else 5.0)
        if not events and short and timeout is not None:
            self._loop.clock += max(0.0, timeout)
        if not events and not short:
            raise RuntimeError("nothing has happened for 5 s and nothing is due: a deadlock")
        return events

    def register(self, fileobj: Any, events: int, data: Any = None) -> Any:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> Any:
        return self._real.unregister(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> Any:
        return self._real.modify(fileobj, events, data)

    def get_map(self) -> Any:
        return self._real.get_map()

    def close(self) -> None:
        self._real.close()


class WatchedTrainer(Trainer):
    """Notes what is being sampled when an update begins."""

    overlaps = 0

    async def update(self, *args: Any) -> Any:
        self.overlaps += bool(self.run.agent.sampling)  # type: ignore[attr-defined]
        return await super().update(*args)


COMBINATIONS = [
    (staleness, stream, on_stale, size)
    for staleness in (0, 1, 2, 4)
    for stream in (False, True)
    for on_stale in (("wait", "drop") if staleness else ("wait",))
    for size in (1, 3)
]
PER_COMBINATION = -(-500 // len(COMBINATIONS))


def settings(tmp_path: Path, staleness: int, stream: bool, on_stale: str, size: int) -> list[str]:
    stale = [f"schedule.on_stale={on_stale}"] if staleness else []
    return [
        "model.tokenizer=bytes",
        "model.path=",
        f"data.sources.all.path={tmp_path / 'prompts.jsonl'}",
        "rollout.backend='null'",
        "rollout.agent=slow",
        "rollout.samples_per_prompt=2",
        "rollout.max_tokens=3",
        "reward.manager=slow",
        "reward.error_budget_frac=1",
        "actor.backend='null'",
        f"actor.minibatch_prompts={size}",
        "train.prompts_per_step=3",
        f"schedule.max_staleness={staleness}",
        f"schedule.stream_minibatches={str(stream).lower()}",
        "schedule.old_logprobs=behaviour",
        "train.log_completions_every=0",
        *stale,
    ]


@pytest.mark.parametrize("combination", COMBINATIONS, ids=str)
def test_of_500_random_schedules_none_breaks_its_bound_waits_for_ever_or_beats_the_replay(
    tmp_path: Path, combination: tuple[int, bool, str, int]
) -> None:
    """Scorecard case 29."""
    write_prompts(tmp_path / "prompts.jsonl", 7)
    plan = plan_run([], settings(tmp_path, *combination), ["null", __file__])

    async def schedules() -> None:
        async with launch(plan, tmp_path) as run:
            for number in range(PER_COMBINATION):
                await one_schedule(run, tmp_path / str(number), number)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(schedules())


async def one_schedule(run: Runtime, directory: Path, number: int) -> None:
    directory.mkdir()
    await run.publish(0)  # as in a new run
    chance = random.Random(number)
    run.agent.chance = run.reward.chance = chance  # type: ignore[attr-defined]
    steps, schedule = chance.randint(1, 5), run.plan.schedule
    prompts = {"all": [Prompt(f"all/{i}", ({"role": "user", "content": f"{i}"},), None, "all") for i in range(7)]}
    progress = Progress(0, seeded_prompts(prompts, {}, number, True), FixedKl(0.0))
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
        trainer = WatchedTrainer(run, progress, steps, {}, sinks)
        while progress.step < steps:
            await trainer.step()
        await trainer.close()
    assert all(row["schedule/staleness_max"] <= schedule.max_staleness for row in trainer.history)
    assert all(row["time/step_s"] >= row["time/ideal_s"] - 1e-9 for row in trainer.history)
    rows = [row for step in range(steps) for row in read_trajectories(directory, step + 1)]
    samples = [(row["id"]["prompt"], row["id"]["epoch"], row["id"]["sample"]) for row in rows]
    assert len(samples) == len(set(samples)) == steps * 3 * 2
    assert trainer.buffer.num_retired == steps * 3 + trainer.buffer.num_discarded
    assert len(trainer.buffer) == 0 or schedule.drop
    if schedule.max_staleness <= 1:
        assert trainer.overlaps == 0


CONFIG = """
model: {{path: "", tokenizer: bytes}}
data: {{sources: {{train: {{path: {prompts}}}}}}}
rollout: {{backend: "null", samples_per_prompt: 2, max_tokens: 8}}
reward: {{functions: {{slow: {{fn: "{rewards}:slow"}}}}}}
actor: {{backend: "null", lr: 0.1, minibatch_prompts: 2}}
train: {{prompts_per_step: 4, max_steps: 10, dir: {runs}}}
checkpoint: {{every_steps: 2}}
schedule: {{max_staleness: 1, stream_minibatches: true}}
"""
REWARDS = """
import asyncio, zlib

async def slow(trajectory, seconds=0.05):
    x = zlib.crc32(repr(trajectory.id).encode()) / 2**32
    await asyncio.sleep(seconds * (0.5 + x))
    return x
"""


@pytest.fixture
def config(tmp_path: Path, forked_runs: None) -> Path:
    (tmp_path / "rewards.py").write_text(REWARDS)
    path = tmp_path / "run.yaml"
    prompts = write_prompts(tmp_path / "prompts.jsonl", 30)
    path.write_text(CONFIG.format(prompts=prompts, rewards=tmp_path / "rewards.py", runs=tmp_path / "runs"))
    return path


def start(config: Path, name: str, *more: str) -> ForkedRun:
    arguments = ["train", str(config), "--plugin", "null", f"train.name={name}", *more]
    return fork_run(arguments, config.parent / f"{name}.log")


def reach(process: ForkedRun, run: Path, text: str, times: int = 1) -> None:
    """Returns when the run's log has said this so many times."""
    until = time.monotonic() + 60
    while not ((run / "log.txt").exists() and (run / "log.txt").read_text().count(text) >= times):
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.02)


def finish(config: Path, name: str, *more: str) -> None:
    assert start(config, name, *more).wait(timeout=120) == 0, (config.parent / f"{name}.log").read_text()


def assert_each_prompt_once(run: Path, steps: int = 10) -> None:
    rows = [row for step in range(1, steps + 1) for row in read_trajectories(run, step)]
    samples = [(row["id"]["prompt"], row["id"]["epoch"], row["id"]["sample"]) for row in rows]
    assert len(samples) == len(set(samples)) == steps * 4 * 2
    # of 30 prompts, the first 10 are issued a second time
    assert sum(epoch == 1 for _, epoch, _ in samples) == 10 * 2


def test_killed_at_random_moments_and_resumed_each_prompt_is_trained_once(config: Path) -> None:
    rng, kills, run = random.Random(1), 0, config.parent / "runs" / "killed"
    slow = ("plugins.null.update_s=0.1", "plugins.null.save_s=0.05", "plugins.null.token_s=0.01")
    more: tuple[str, ...] = ()
    while kills < 5:
        process = start(config, "killed", *slow, *more)
        more = ("--resume", "--from-start")
        # the first kill leaves something to resume from, the others fall on runs that were resumed
        reach(process, run, "launched" if kills else ": saved ", kills + 1)
        time.sleep(rng.uniform(0.0, 1.2))
        if process.poll() is not None:
            break
        process.kill()
        kills += 1
        process.wait()
    finish(config, "killed", *slow, *more)
    assert kills > 1
    assert_each_prompt_once(run)


PHASES = {
    "sampling": ("plugins.null.token_s=0.2", "launched"),
    "rewards": ("reward.functions.slow.kwargs={seconds: 3}", "launched"),
    # an update of the first steps comes before the first save, so nothing could be resumed
    "updating": ("plugins.null.update_s=1", "step 3: updating"),
    "saving": ("plugins.null.save_s=2", "saving"),
}


@pytest.mark.parametrize("phase", PHASES)
def test_a_signal_ends_a_run_with_trajectories_in_flight_and_it_can_be_resumed(config: Path, phase: str) -> None:
    setting, text = PHASES[phase]
    process, run = start(config, phase, setting), config.parent / "runs" / phase
    reach(process, run, text)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    sent = time.monotonic()
    assert process.wait(timeout=30) == 143
    assert time.monotonic() - sent < 10.0
    assert "Traceback" not in (config.parent / f"{phase}.log").read_text()
    finish(config, phase, "--resume")
    assert_each_prompt_once(run)
