"""The ledger of prompts in flight: what a checkpoint's rows count for, and what ends those who wait."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest

from rlcore.contracts.agents import AgentLoop, RolloutTask
from rlcore.contracts.reward_manager import RewardManager
from rlcore.errors import WorkerError
from rlcore.testing.prompts import seeded_prompts
from rlcore.testing.rewards import make_prompt, make_trajectory
from rlcore.train.buffer import Issuing, RolloutBuffer
from rlcore.types import Lane, Reward, Sampling, ScoredTrajectory, Trajectory

DEADLINE_S = 10.0


class AtOnce(AgentLoop):
    """Samples every task at once, and notes its prompt."""

    def __init__(self) -> None:
        self.issued: list[str] = []

    async def rollout(self, tasks: Sequence[RolloutTask], sampling: Sampling, lane: Lane) -> AsyncIterator[Trajectory]:
        for task in tasks:
            self.issued.append(task.prompt.id)
            for sample in range(task.n):
                yield make_trajectory(task.prompt, sample)


class Ones(RewardManager):
    """A reward of 1 for everything; with `held`, when that is set."""

    def __init__(self, held: asyncio.Event | None = None) -> None:
        self._held = held

    async def score(self, stream: AsyncIterator[Trajectory], lane: Lane) -> AsyncIterator[ScoredTrajectory]:
        async for row in stream:
            if self._held is not None:
                await self._held.wait()
            yield ScoredTrajectory(row, Reward(1.0))


def flight(reward: RewardManager, drop: bool = True, agent: AgentLoop | None = None) -> RolloutBuffer:
    """Of groups of two, a prompt per step, where steps take what is ready first and may be one version late.

    Without `drop` they take their own.
    """
    order = seeded_prompts({"test": [make_prompt(0), make_prompt(1), make_prompt(2)]}, {}, 0, False)
    issuing = Issuing(1, 2, 0, Sampling(), max_staleness=1, drop=drop)
    return RolloutBuffer(agent or AtOnce(), reward, order, issuing)


@pytest.mark.parametrize(("version", "discarded"), [(2, 1), (3, 0)])
def test_rows_of_a_checkpoint_are_as_old_as_they_were_when_the_rest_of_their_group_is_sampled_again(
    version: int, discarded: int
) -> None:
    async def resumed() -> tuple[int, list[int]]:
        ledger = flight(Ones())
        prompt = make_prompt(0)
        already_scored = [ScoredTrajectory(make_trajectory(prompt, 0), Reward(1.0))]
        saved = {"prompt": prompt.id, "epoch": already_scored[0].trajectory.id.epoch, "due": 5, "version": version}
        ledger.restore(3, [saved], already_scored)
        ledger.refill(4, 4)
        await asyncio.wait_for(ledger.sampled(), DEADLINE_S)
        await asyncio.sleep(0.01)
        ledger.published(4, [])
        left = [entry["version"] for entry in ledger.state()]
        await ledger.close()
        return ledger.num_discarded, left

    assert asyncio.run(resumed()) == (discarded, [3] * (1 - discarded))


def test_what_ends_forward_passes_is_raised_while_rewards_are_pending() -> None:
    async def fail() -> None:
        raise WorkerError("reference[0]: its actor ended")

    async def wait() -> None:
        ledger = flight(Ones(asyncio.Event()))
        ledger.refill(1, 1)
        ledger.watch(asyncio.create_task(fail()))
        try:
            await asyncio.wait_for(ledger.next_ready(1), DEADLINE_S)
        finally:
            await ledger.close()

    with pytest.raises(WorkerError, match=r"reference\[0\]: its actor ended"):
        asyncio.run(wait())


def restored(saved_version: int, already_scored: int) -> RolloutBuffer:
    """At version 3, a prompt of an earlier checkpoint, due at step 5, of which so many rewards were kept."""
    ledger = flight(Ones())
    prompt = make_prompt(0)
    rows = [ScoredTrajectory(make_trajectory(prompt, sample), Reward(1.0)) for sample in range(already_scored)]
    saved = {"prompt": prompt.id, "epoch": 0, "due": 5, "version": saved_version}
    ledger.restore(3, [saved], rows)
    return ledger


@pytest.mark.parametrize(("saved_version", "kept"), [(2, 2), (1, 0)])
def test_rewards_of_a_checkpoint_are_kept_unless_their_rows_are_too_old_to_be_trained_on(
    saved_version: int, kept: int
) -> None:
    async def scored() -> int:
        return len(restored(saved_version, 2).scored())

    assert asyncio.run(scored()) == kept


class InTwoParts(AtOnce):
    """Samples of unknown length: each has a second segment, after `more` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.more = asyncio.Event()

    async def rollout(self, tasks: Sequence[RolloutTask], sampling: Sampling, lane: Lane) -> AsyncIterator[Trajectory]:
        for segment in range(2):
            async for row in super().rollout(tasks, sampling, lane):
                yield replace(row, id=replace(row.id, segment=segment), num_segments=0)
            await self.more.wait()


def test_a_checkpoint_has_no_part_of_a_sample_that_another_segment_may_follow() -> None:
    async def counted() -> list[int]:
        agent = InTwoParts()
        ledger = flight(Ones(), agent=agent)
        ledger.issue(1, 1)
        await asyncio.sleep(0.05)
        before, state = ledger.scored(), ledger.state()
        agent.more.set()
        rows = (await asyncio.wait_for(ledger.next_ready(1), DEADLINE_S)).group()
        resumed = flight(Ones())
        resumed.restore(0, state, ledger.scored())
        restored = (await asyncio.wait_for(resumed.next_ready(1), DEADLINE_S)).group()
        await ledger.close()
        return [len(before), len(rows), len(restored)]

    assert asyncio.run(counted()) == [0, 4, 4]


def test_a_prompt_of_a_checkpoint_that_is_sampled_again_as_a_whole_is_as_old_as_the_weights_now() -> None:
    async def resumed() -> tuple[int, list[int]]:
        ledger = restored(2, 0)
        ledger.refill(4, 4)
        await asyncio.wait_for(ledger.sampled(), DEADLINE_S)
        await asyncio.sleep(0.01)
        ledger.published(4, [])
        left = [entry["version"] for entry in ledger.state()]
        await ledger.close()
        return ledger.num_discarded, left

    assert asyncio.run(resumed()) == (0, [3])


@pytest.mark.parametrize("drop", [False, True])
def test_a_step_leaves_no_queue_when_it_is_published(drop: bool) -> None:
    async def steps() -> int:
        ledger = flight(Ones(), drop)
        for step in range(1, 4):
            ledger.refill(step, 3)
            ledger.published(step, [await asyncio.wait_for(ledger.next_ready(step), DEADLINE_S)])
        await ledger.close()
        return len(ledger._ready)

    assert asyncio.run(steps()) == 0


def test_prompts_of_later_steps_rest_after_a_resume_with_a_lower_staleness_bound() -> None:
    """Sampled at once they would be too old for their steps, and end the run."""
    prompts = [make_prompt(index) for index in range(3)]

    async def resumed(max_staleness: int) -> tuple[list[list[str]], list[int]]:
        order, agent = seeded_prompts({"test": prompts}, {}, 0, False), AtOnce()
        ledger = RolloutBuffer(agent, Ones(), order, Issuing(1, 2, 0, Sampling(), max_staleness, drop=False))
        saved = [{"prompt": prompt.id, "epoch": 0, "due": 4 + due, "version": 1} for due, prompt in enumerate(prompts)]
        ledger.restore(3, saved, [])
        issued, versions = [], []
        for step in (4, 5, 6):
            agent.issued.clear()
            taken = ledger.refill(step, 6)
            await asyncio.wait_for(ledger.sampled(), DEADLINE_S)
            await asyncio.wait_for(ledger.next_ready(step), DEADLINE_S)
            issued.append(sorted(agent.issued))
            versions += [member.version for member in taken]
            ledger.published(step, taken)
        await ledger.close()
        return issued, versions

    first, second, third = (prompt.id for prompt in prompts)
    assert asyncio.run(resumed(0)) == ([[first], [second], [third]], [3, 4, 5])
    assert asyncio.run(resumed(1)) == ([[first, second], [third], []], [3, 3, 4])
    assert asyncio.run(resumed(3)) == ([[first, second, third], [], []], [3, 3, 3])


def test_a_prompt_that_became_stale_is_not_handed_out_even_if_it_was_ready() -> None:
    async def handed_out() -> int:
        ledger = flight(Ones())
        ledger.refill(1, 9)
        await asyncio.wait_for(ledger.next_ready(1), DEADLINE_S)
        await asyncio.sleep(0.01)  # the second prompt of version 0 becomes ready
        ledger.published(2, [])
        ledger.refill(3, 9)
        issued = await asyncio.wait_for(ledger.next_ready(3), DEADLINE_S)
        await ledger.close()
        return issued.version

    assert asyncio.run(handed_out()) == 2


Trained = list[list[tuple[str, int]]]
"""Prompts of each step, with the versions that they are from."""


def continued(drop: bool, per_step: int, saved: Sequence[tuple[int, int]], steps: int) -> tuple[Trained, int]:
    """The prompts of the steps from 4 on after a resume, and the number of discarded ones, at a staleness of 1.

    `saved` has the due step and the number of scored samples, of version 3, of each prompt in flight.
    """
    prompts = [make_prompt(index) for index in range(12)]
    in_flight = list(zip(prompts, saved, strict=False))

    async def resumed() -> tuple[Trained, int]:
        order = seeded_prompts({"test": prompts}, {}, 0, False)
        order.next_prompts(len(saved))
        ledger = RolloutBuffer(AtOnce(), Ones(), order, Issuing(per_step, 2, 0, Sampling(), 1, drop=drop))
        state = [{"prompt": prompt.id, "epoch": 0, "due": due, "version": 3} for prompt, (due, _) in in_flight]
        rows = [
            ScoredTrajectory(make_trajectory(prompt, sample), Reward(1.0))
            for prompt, (_, num_scored) in in_flight
            for sample in range(num_scored)
        ]
        ledger.restore(3, state, rows)
        trained: Trained = []
        for step in range(4, 4 + steps):
            num = len(ledger.refill(step, 99)) or per_step
            taken = [await asyncio.wait_for(ledger.next_ready(step), DEADLINE_S) for _ in range(num)]
            await asyncio.wait_for(ledger.sampled(), DEADLINE_S)
            await asyncio.sleep(0.01)  # the rewards of the others arrive
            trained.append([(member.task.prompt.id, member.version) for member in taken])
            ledger.published(step, taken)
        await ledger.close()
        return trained, ledger.num_discarded

    return asyncio.run(resumed())


def test_prompts_in_flight_are_dealt_again_to_steps_that_take_fewer_or_more() -> None:
    """None is lost, and rewards that would be too old for the step are not kept."""
    a, b, c, d, e, f = (make_prompt(index).id for index in range(6))
    of_drop = [(5, 2)] * 4
    assert continued(False, 1, of_drop, 4) == ([[(a, 3)], [(b, 3)], [(c, 4)], [(d, 5)]], 0)
    one_a_step = [(4, 2), (5, 2), (6, 2), (7, 2)]
    assert continued(False, 3, one_a_step, 2) == ([[(a, 3), (b, 3), (c, 3)], [(d, 3), (e, 3), (f, 3)]], 0)


@pytest.mark.parametrize("num_scored", [(2, 2, 2, 2, 2), (0, 0, 0, 0, 1), (0, 1, 2, 2, 2)])
def test_prompts_in_flight_that_no_step_takes_in_time_rest_until_later_steps_do(num_scored: Sequence[int]) -> None:
    """With `drop` they would be sampled only to be discarded."""
    trained, num_discarded = continued(True, 1, [(5, num) for num in num_scored], 5)
    assert [version for step in trained for _, version in step] == [3, 3, 4, 5, 6]
    assert {prompt for step in trained for prompt, _ in step} == {make_prompt(index).id for index in range(5)}
    assert num_discarded == 0


@pytest.mark.parametrize("drop", [False, True])
def test_prompts_in_flight_that_no_step_will_train_on_are_kept_and_not_sampled(drop: bool) -> None:
    """A run of three more steps was resumed as one of a single step."""
    prompts = [make_prompt(index) for index in range(3)]

    async def resumed() -> tuple[list[str], list[str]]:
        order, agent = seeded_prompts({"test": prompts}, {}, 0, False), AtOnce()
        ledger = RolloutBuffer(agent, Ones(), order, Issuing(1, 2, 0, Sampling(), max_staleness=2, drop=drop))
        saved = [{"prompt": prompt.id, "epoch": 0, "due": 4 + due, "version": 3} for due, prompt in enumerate(prompts)]
        ledger.restore(3, saved, [])
        ledger.refill(4, 4)
        taken = await asyncio.wait_for(ledger.next_ready(4), DEADLINE_S)
        await asyncio.wait_for(ledger.sampled(), DEADLINE_S)
        ledger.published(4, [taken])
        await ledger.close()
        return agent.issued, [entry["prompt"] for entry in ledger.state()]

    first, *others = (prompt.id for prompt in prompts)
    assert asyncio.run(resumed()) == ([first], others)


class Stuck(RewardManager):
    """A reward of 1 for the first prompt of each pass; the others wait until the pass ends."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    async def score(self, stream: AsyncIterator[Trajectory], lane: Lane) -> AsyncIterator[ScoredTrajectory]:
        first = None
        try:
            async for row in stream:
                first = first or row.prompt
                if row.prompt == first:
                    yield ScoredTrajectory(row, Reward(1.0))
            await asyncio.Event().wait()
        finally:
            self.ended.set()


def test_rewards_of_prompts_that_became_stale_are_no_longer_computed() -> None:
    async def ended() -> list[bool]:
        reward = Stuck()
        ledger = flight(reward)
        ledger.refill(1, 9)
        ledger.published(1, [await asyncio.wait_for(ledger.next_ready(1), DEADLINE_S)])
        await asyncio.sleep(0.01)
        before = reward.ended.is_set()
        ledger.published(2, [])
        await asyncio.wait_for(reward.ended.wait(), DEADLINE_S)
        ledger.refill(3, 3)
        issued = await asyncio.wait_for(ledger.next_ready(3), DEADLINE_S)
        await asyncio.wait_for(ledger.sampled(), DEADLINE_S)
        await ledger.close()
        return [before, issued.version == 2, ledger.num_discarded == 1]

    assert asyncio.run(ended()) == [False, True, True]
