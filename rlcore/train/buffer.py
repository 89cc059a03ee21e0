"""The rollout buffer: all issued prompts that are not yet retired, with their samples and scores so far.

It alone decides which prompt is due at which step. Prompts are issued in passes: one call of the agent loop, whose
trajectories go to the reward manager as soon as they are finished. Several passes may be in flight at a time. A prompt
is *sampled* when all its trajectories are finished, *ready* when all of them are scored, and *retired* when it was
trained on, left out, or discarded. Everything is matched by id; the order of arrival affects only readiness.
"""

import asyncio
import gc
import itertools
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rlcore.contracts.activity import SampleCounts
from rlcore.contracts.agents import AgentLoop
from rlcore.contracts.offers import Scope
from rlcore.contracts.reward_manager import RewardManager
from rlcore.data import IssuedPrompts
from rlcore.errors import WorkerError
from rlcore.runtime.launch import Runtime
from rlcore.train.pending import Key, PassCallbacks, PendingGroup, run_pass, sample_counts
from rlcore.train.tasks import tasks_for, training_sampling
from rlcore.types import Lane, Sampling, ScoredTrajectory

TIDY_S = 1.0
"""Seconds between two collections of garbage."""


@dataclass(frozen=True)
class Issuing:
    """The settings by which prompts are issued."""

    prompts_per_step: int
    samples_per_prompt: int
    seed: int
    sampling: Sampling
    max_staleness: int = 0
    drop: bool = False
    """True if steps take the first ready prompts, and prompts that became too old are discarded."""
    in_turn: bool = True
    """True if a pass starts to sample only when the one before it has finished, because they share a device."""
    keep_partial: bool = True
    """True if rewards of an incomplete group can be kept, because none depends on the whole group."""


def issuing(run: Runtime) -> Issuing:
    """The limits that the plan states."""
    config, schedule = run.plan.config, run.plan.schedule
    return Issuing(
        prompts_per_step=config.train.prompts_per_step,
        samples_per_prompt=config.rollout.samples_per_prompt,
        seed=config.train.seed,
        sampling=training_sampling(config.rollout),
        max_staleness=schedule.max_staleness,
        drop=schedule.drop,
        in_turn=schedule.sample_before_update,
        keep_partial=run.reward.scope is Scope.SAMPLE,
    )


class RolloutBuffer:
    """The ledger of prompts in flight."""

    def __init__(self, agent: AgentLoop, reward: RewardManager, order: IssuedPrompts, issuing: Issuing) -> None:
        self._agent, self._reward, self._issuing = agent, reward, issuing
        self.order = order
        self.version = 0
        """Version of the weights that sample from now on."""
        self.num_retired = 0
        """Prompts that were trained on, left out or discarded."""
        self.num_discarded = 0
        self._numbers = itertools.count()
        self._issued: dict[Key, PendingGroup] = {}
        self._ready: dict[int, deque[PendingGroup]] = defaultdict(deque)
        self._passes: dict[asyncio.Task[None], Sequence[PendingGroup]] = {}
        self._last_sampled: asyncio.Event | None = None
        self._resting: list[PendingGroup] = []
        """Prompts restored from a checkpoint and not ready; issued again with the first `refill` that may."""
        self._num_unsampled = 0
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None
        self._tidy_from = 0.0

    def __len__(self) -> int:
        return len(self._issued)

    def tidy(self) -> None:
        """Collect Python's young garbage, at most once per second, because it costs time for every object in flight."""
        if (now := time.monotonic()) >= self._tidy_from:
            gc.collect(1)
            self._tidy_from = now + TIDY_S

    def refill(self, step: int, last_step: int) -> list[PendingGroup]:
        """Issue the prompts that `step` and the staleness bound allow, but none that no step up to `last_step` will
        train on.

        Returns the prompts that `step` must train on; none if steps take the first ready prompts.
        """
        per_step, ahead = self._issuing.prompts_per_step, self._issuing.max_staleness
        if self._issuing.drop:
            wanted = per_step * min(ahead + 1, last_step - step + 1)
            self._reissue(self._resting[: max(0, wanted - len(self._issued) + len(self._resting))])
            self.issue(max(0, wanted - len(self._issued)), step + ahead)
            return []
        last_due = min(step + ahead, last_step)
        # after a resume with a lower staleness bound, prompts of later steps would be too old by then
        self._reissue([member for member in self._resting if member.due <= last_due])
        issued = Counter(pending.due for pending in self._issued.values())
        for due in range(step, last_due + 1):
            if issued[due] < per_step:  # those of a checkpoint may not fill their last step
                self.issue(per_step - issued[due], due)
        return [pending for pending in self._issued.values() if pending.due == step]

    def issue(self, num: int, due: int) -> list[PendingGroup]:
        """Send the next `num` prompts of the order to the agent loop, in one pass."""
        issuing = self._issuing
        tasks = tasks_for(self.order.next_prompts(num), issuing.samples_per_prompt, issuing.seed)
        members = [PendingGroup(task, next(self._numbers), due, self.version) for task in tasks]
        for member in members:
            if member.key in self._issued:
                raise WorkerError(f"schedule: prompt {member.key} is issued while it is in flight")
            self._issued[member.key] = member
        self._send(members)
        return members

    async def sampled(self, members: Sequence[PendingGroup] | None = None) -> None:
        """Wait until all trajectories of `members`, or of everything in flight, are finished."""
        left = None if members is None else list(members)

        def holds() -> bool:
            if left is None:
                return self._num_unsampled == 0
            while left and left[-1].sampled:
                left.pop()
            return not left

        await self._until(holds)

    async def next_ready(self, due: int) -> PendingGroup:
        """The next ready prompt of that step, or of all prompts if steps take the first ready ones."""
        ready = self._ready[self._queue(due)]
        await self._until(lambda: bool(ready))
        return ready.popleft()

    def published(self, version: int, taken: Iterable[PendingGroup]) -> None:
        """Record that the weights are now `version`, trained on `taken`; discard prompts that have become too old."""
        self.version = version
        used = sorted(taken, key=lambda member: member.number)
        self.order.record((member.group(), member.version) for member in used)
        self.retire(used)
        self.num_discarded += self._discard_stale()
        for queue in [queue for queue, ready in self._ready.items() if not ready]:
            del self._ready[queue]

    def retire(self, members: Iterable[PendingGroup]) -> None:
        """Remove them from the buffer."""
        for member in members:
            if not member.retired:
                member.retired = True
                self.num_retired += 1
                del self._issued[member.key]
                if not member.sampled:
                    self._note_sampled(member)

    def _discard_stale(self) -> int:
        """Retire prompts that are too old to train on, if steps do not wait for them; returns their number."""
        if not self._issuing.drop:
            return 0
        resting = set(self._resting)  # they are sampled later
        stale = [pending for pending in self._issued.values() if self._too_old(pending) and pending not in resting]
        self.retire(stale)
        self._end_passes_of(stale)
        for queue, ready in list(self._ready.items()):
            self._ready[queue] = deque(pending for pending in ready if not pending.retired)
        return len(stale)

    def _end_passes_of(self, discarded: Iterable[PendingGroup]) -> None:
        """End passes whose prompts are all retired: calls of rewards would take the places of those that count.

        Prompts of a pass become too old together, unless a checkpoint has samples of some.
        """
        unwanted = set(discarded)
        for task, members in self._passes.items():
            if not unwanted.isdisjoint(members) and all(member.retired for member in members):
                task.cancel()

    def counts(self, step: int) -> SampleCounts:
        """Counts of samples due at the step, or of all in flight if steps take the first ready prompts; thread-safe."""
        issued = list(self._issued.values())
        return sample_counts([member for member in issued if self._issuing.drop or member.due == step])

    def watch(self, task: "asyncio.Task[None]") -> None:
        """Watch a task: like an error of a pass, its error is raised where prompts are awaited."""
        task.add_done_callback(self._pass_ended)

    async def close(self) -> None:
        """End the passes; the buffer is kept for a checkpoint."""
        passes = list(self._passes)
        for task in passes:
            task.cancel()
        await asyncio.gather(*passes, return_exceptions=True)

    def state(self) -> list[dict[str, Any]]:
        """The prompts in flight in the order in which they were issued, as JSON."""
        return [
            {
                "prompt": pending.task.prompt.id,
                "epoch": pending.task.epoch,
                "due": pending.due,
                "version": pending.version,
            }
            for pending in self._issued.values()
        ]

    def scored(self) -> list[ScoredTrajectory]:
        """Every trajectory in flight of a sample whose rewards have all arrived."""
        return [row for pending in self._issued.values() for row in pending.scored_whole()]

    def restore(self, version: int, state: Sequence[dict[str, Any]], scored: Iterable[ScoredTrajectory]) -> None:
        """Restore what `state` and `scored` returned. Rewards of trajectories that will be too old are discarded.

        The prompts are dealt to steps again in their order, because the settings that dealt them may have changed.
        """
        self.version = version
        rows: dict[Key, list[ScoredTrajectory]] = defaultdict(list)
        for row in scored:
            rows[row.trajectory.id.prompt, row.trajectory.id.epoch].append(row)
        issuing = self._issuing
        for saved in state:
            prompt = self.order.prompt(saved["prompt"])
            (task,) = tasks_for([(prompt, saved["epoch"])], issuing.samples_per_prompt, issuing.seed)
            # with `drop`, prompts that are ready are taken first
            place = len(self._issued) - len(self._resting) if issuing.drop else len(self._issued)
            used_with = version + place // issuing.prompts_per_step
            due = saved["due"] if issuing.drop else used_with + 1
            pending = PendingGroup(task, next(self._numbers), due, saved["version"])
            self._issued[pending.key] = pending
            if used_with - saved["version"] <= issuing.max_staleness:
                pending.restore(rows[pending.key], issuing.keep_partial)
            if pending.ready:
                self._ready[self._queue(pending.due)].append(pending)
            else:
                self._resting.append(pending)

    def _queue(self, due: int) -> int:
        return 0 if self._issuing.drop else due

    def _too_old(self, pending: PendingGroup) -> bool:
        return self.version - pending.version > self._issuing.max_staleness

    def _reissue(self, allowed: Sequence[PendingGroup]) -> None:
        """Send these prompts of a checkpoint, without rewards that have become too old while they rested."""
        resting = set(self._resting) - set(allowed)
        self._resting = [member for member in self._resting if member in resting]
        for member in allowed:
            if self._too_old(member):
                member.forget()
        for due in sorted({member.due for member in allowed}):
            self._send([member for member in allowed if member.due == due])

    def _send(self, members: list[PendingGroup]) -> None:
        if not members:
            return
        self._num_unsampled += len(members)
        begin, self._last_sampled = self._last_sampled, asyncio.Event()
        callbacks = PassCallbacks(self._note_sampled, self._note_ready, lambda: self.version)
        work = run_pass(
            members,
            self._agent,
            self._reward,
            self._issuing.sampling,
            Lane.TRAIN,
            callbacks,
            begin if self._issuing.in_turn else None,
            self._last_sampled,
        )
        task = asyncio.create_task(work, name=f"prompts due at step {members[0].due}")
        self._passes[task] = members
        task.add_done_callback(self._pass_ended)

    def _pass_ended(self, task: "asyncio.Task[None]") -> None:
        self._passes.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None and self._failure is None:
            self._failure = error
        self._changed.set()

    def _note_sampled(self, issued: PendingGroup) -> None:
        issued.sampled = True
        self._num_unsampled -= 1
        self._changed.set()

    def _note_ready(self, issued: PendingGroup) -> None:
        issued.ready, issued.ready_at = True, asyncio.get_running_loop().time()
        if not issued.retired:
            self._ready[self._queue(issued.due)].append(issued)
            self._changed.set()

    async def _until(self, holds: Callable[[], bool]) -> None:
        """Wait for the condition; errors of passes are raised. The deadlines are those of agent loop and reward
        manager."""
        while True:
            if self._failure is not None:
                raise self._failure
            if holds():
                return
            self._changed.clear()
            await self._changed.wait()
