"""For authors of rewards: trajectories and a build context for tests, and the conformance check of a reward manager."""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from rlcore.cluster.child import ChildProcesses
from rlcore.config import RewardConfig, RewardFunctionConfig, RolloutConfig, RunConfig
from rlcore.errors import PlanError, RlcoreError
from rlcore.plan import BuildContext, ResolvedReward, Role, Scope
from rlcore.reward import FunctionRewards, RewardManager, build_function_rewards
from rlcore.testing.leaks import Leaked, leaks
from rlcore.tokens import ByteTokens
from rlcore.types import Finish, FrozenDict, Lane, Prompt, Reward, RewardStatus, Scored, Trajectory, TrajectoryId
from rlcore.workers import Children, WorkerGroup

if TYPE_CHECKING:
    from rlcore.testing.conformance import Report

T = TypeVar("T")

WAIT_S = 30.0
"""Nothing that a manager is asked to do here may take longer."""


def make_prompt(index: int = 0, answer: Any = None, source: str = "test", **columns: Any) -> Prompt:
    """A prompt of one user message; its answer is its index unless another is given."""
    return Prompt(
        id=f"{source}/{index}",
        messages=(FrozenDict({"role": "user", "content": f"question {index}"}),),
        answer=str(index) if answer is None else answer,
        source=source,
        columns=FrozenDict(columns),
    )


def make_trajectory(prompt: Prompt | int = 0, sample: int = 0, text: str | None = None, **fields: Any) -> Trajectory:
    """A finished trajectory: the prompt's bytes, then those of `text`, which were sampled with log-prob -1.

    `fields` replace fields of the Trajectory; `part` that of its id.
    """
    prompt = make_prompt(prompt) if isinstance(prompt, int) else prompt
    completion = f"{prompt.id} sample {sample}" if text is None else text
    asked, said = f"question of {prompt.id}".encode(), completion.encode()
    mask = np.array([False] * len(asked) + [True] * len(said))
    trajectory = Trajectory(
        id=TrajectoryId(prompt.id, 0, sample, fields.pop("part", 0)),
        prompt=prompt,
        token_ids=np.array([*asked, *said], dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
        completion=completion,
        finish=Finish.STOP,
        versions=((len(asked), 0),),
    )
    return replace(trajectory, **fields)


def reward_context(
    functions: Mapping[str, RewardFunctionConfig],
    run_dir: Path,
    children: Children | None = None,
    reward: RewardConfig | None = None,
    config: RunConfig | None = None,
    section: Any = None,
) -> BuildContext:
    """What a reward manager is built with, as a run would do it, but with references taken as they are.

    `fn` of each function is 'module:name' or '/path/file.py:name'; `children` defaults to real child processes.
    """
    config = config or RunConfig(rollout=RolloutConfig(samples_per_prompt=4))
    config = replace(config, reward=replace(reward or RewardConfig(), functions=dict(functions)))

    def no_workers(role: Role[Any]) -> WorkerGroup[Any]:
        raise PlanError(f"role '{role.name}': this context has no workers")

    return BuildContext(
        config=config,
        section=section,
        workers=no_workers,
        generator=None,
        reward_functions={name: _resolved(name, each) for name, each in functions.items()},
        tokens=ByteTokens(),
        children=children if children is not None else ChildProcesses(),
        run_dir=run_dir,
        seed=0,
        metrics=lambda name, value: None,
    )


def _resolved(name: str, function: RewardFunctionConfig) -> ResolvedReward:
    scope = Scope.SAMPLE if function.scope == "declared" else Scope(function.scope)
    return ResolvedReward(
        name,
        function.fn,
        "the test",
        function.weight,
        scope,
        function.deadline_s,
        function.kwargs,
        post_process=function.post_process,
    )


async def stream_of(trajectories: Sequence[Trajectory]) -> AsyncIterator[Trajectory]:
    """The trajectories, one in each turn of the loop."""
    for each in trajectories:
        await asyncio.sleep(0)
        yield each


async def score_all(
    manager: RewardManager, trajectories: Sequence[Trajectory], lane: Lane = Lane.TRAIN
) -> list[Scored]:
    """Everything the manager makes of these trajectories, in the order it comes; TimeoutError after 30 s."""
    async with asyncio.timeout(WAIT_S), aclosing(manager.score(stream_of(trajectories), lane)) as results:  # type: ignore[type-var]
        return [each async for each in results]


def use_rewards(
    functions: Mapping[str, RewardFunctionConfig],
    use: Callable[[FunctionRewards], Awaitable[T]],
    reward: RewardConfig | None = None,
    config: RunConfig | None = None,
) -> T:
    """What `use` makes of the core's manager with these functions, which is started before and closed after it."""

    async def main() -> T:
        children = ChildProcesses()
        manager = build_function_rewards(reward_context(functions, Path("unused"), children, reward, config))
        try:
            await manager.start()
            return await use(manager)
        finally:
            await manager.close()
            await children.close()

    return asyncio.run(main())


def score_rewards(
    functions: Mapping[str, RewardFunctionConfig],
    trajectories: Sequence[Trajectory],
    lane: Lane = Lane.TRAIN,
    reward: RewardConfig | None = None,
    config: RunConfig | None = None,
) -> dict[tuple[str, int, int], Reward]:
    """The reward of each trajectory, by prompt, sample and part, from real children."""
    scored = use_rewards(functions, lambda manager: score_all(manager, trajectories, lane), reward, config)
    return {
        (each.trajectory.id.prompt, each.trajectory.id.sample, each.trajectory.id.part): each.reward for each in scored
    }


def check_reward_manager(
    build: Callable[[BuildContext], RewardManager],
    context: BuildContext,
    trajectories: Sequence[Trajectory] = (),
    failing: Sequence[Trajectory] = (),
    expected: Callable[[Trajectory], float] | None = None,
) -> "Report":
    """What breaks the contract of `RewardManager`, found by using one as a run does.

    `trajectories` default to two groups of four; `failing` are some whose reward cannot be had: they must come back as
    FAILED; `expected` gives the right score of a trajectory. Runs a loop of its own, so call it from plain code.
    """
    from rlcore.testing.conformance import Report  # late: whoever only wants fakes needs no plugins loaded

    check = _Check(build, context, trajectories or _groups(), failing, expected)
    try:
        with leaks():
            asyncio.run(check.run())
    except Leaked as leaked:
        check.problems.append(f"after close: {leaked}")
    return Report("reward manager", tuple(check.problems), ())


def _groups() -> list[Trajectory]:
    return [make_trajectory(prompt, sample) for prompt in range(2) for sample in range(4)]


class _Check:
    """The single checks; each adds to `problems`."""

    def __init__(
        self,
        build: Callable[[BuildContext], RewardManager],
        context: BuildContext,
        trajectories: Sequence[Trajectory],
        failing: Sequence[Trajectory],
        expected: Callable[[Trajectory], float] | None,
    ) -> None:
        self.build, self.context, self.expected = build, context, expected
        self.trajectories, self.failing = trajectories, failing
        self.problems: list[str] = []

    async def run(self) -> None:
        """Every check; stops at the first error of rlcore or time limit, which is a problem too."""
        try:
            await self._unstarted()
            manager = self.build(self.context)
            try:
                await asyncio.wait_for(manager.start(), WAIT_S)
                await self._exactly_once(manager)
                await self._parts(manager)
                await self._early_end(manager)
                await self._upstream_error(manager)
                await self._failures(manager)
                self._numbers(manager)
                await self._restored(manager)
            finally:
                await asyncio.wait_for(manager.close(), WAIT_S)
                await asyncio.wait_for(manager.close(), WAIT_S)
        except TimeoutError:
            self.problems.append(f"something took longer than {WAIT_S:g} s")
        except RlcoreError as error:
            self.problems.append(f"raised {type(error).__name__}: {error}")

    async def _unstarted(self) -> None:
        await asyncio.wait_for(self.build(self.context).close(), WAIT_S)

    async def _exactly_once(self, manager: RewardManager) -> None:
        for lane, order in ((Lane.TRAIN, 1), (Lane.EVAL, -1)):
            given = {each.id: each for each in self.trajectories[::order]}
            scored = await score_all(manager, list(given.values()), lane)
            found = [each.trajectory.id for each in scored]
            if sorted(found) != sorted(given):
                self.problems.append(f"{lane}: of {len(given)} trajectories came back {len(found)}, not each once")
            for each in scored:
                self._one(each, given)

    def _one(self, scored: Scored, given: Mapping[TrajectoryId, Trajectory]) -> None:
        reward, name = scored.reward, scored.trajectory.id
        original = given.get(name)
        if original is None or not np.array_equal(scored.trajectory.token_ids, original.token_ids):
            self.problems.append(f"{name}: came back with other tokens than it went in with")
        elif reward.status is not RewardStatus.OK:
            self.problems.append(f"{name}: status {reward.status}: {reward.info.get('error')}")
        elif not math.isfinite(reward.score):
            self.problems.append(f"{name}: the score is {reward.score}")
        elif self.expected is not None and not math.isclose(reward.score, self.expected(original), rel_tol=1e-6):
            self.problems.append(f"{name}: scored {reward.score}, not {self.expected(original)}: another one's reward?")

    async def _parts(self, manager: RewardManager) -> None:
        whole = self.trajectories[0]
        parts = [replace(whole, id=replace(whole.id, part=part), num_parts=2) for part in (1, 0)]
        scored = await score_all(manager, parts)
        if sorted(each.trajectory.id.part for each in scored) != [0, 1]:
            self.problems.append("a sample of two parts: not each part came back once")
        elif len({each.reward.score for each in scored}) > 1:
            self.problems.append("a sample of two parts: the parts have different rewards")

    async def _early_end(self, manager: RewardManager) -> None:
        async with asyncio.timeout(WAIT_S):
            async with aclosing(manager.score(stream_of(self.trajectories), Lane.TRAIN)) as results:  # type: ignore[type-var]
                async for _ in results:
                    break
        if len(await score_all(manager, self.trajectories)) != len(self.trajectories):
            self.problems.append("after a stream was closed early, the next one was not scored in full")

    async def _upstream_error(self, manager: RewardManager) -> None:
        async def broken() -> AsyncIterator[Trajectory]:
            yield self.trajectories[0]
            raise _UpstreamError

        try:
            async with asyncio.timeout(WAIT_S):
                async with aclosing(manager.score(broken(), Lane.TRAIN)) as results:  # type: ignore[type-var]
                    async for _ in results:
                        pass
            self.problems.append("an error of the stream of trajectories is swallowed")
        except _UpstreamError:
            pass

    async def _failures(self, manager: RewardManager) -> None:
        for each in self.failing:
            [scored] = await score_all(manager, [each])
            if scored.reward.status is not RewardStatus.FAILED or scored.reward.score != 0.0:
                self.problems.append(f"{each.id}: must be FAILED with score 0, is {scored.reward.status}")
            elif not scored.reward.info.get("error"):
                self.problems.append(f"{each.id}: FAILED without info['error']")

    def _numbers(self, manager: RewardManager) -> None:
        for name, value in manager.metrics().items():
            if not isinstance(value, float) or not math.isfinite(value):
                self.problems.append(f"metrics: '{name}' is {value!r}; a finite float is needed")

    async def _restored(self, manager: RewardManager) -> None:
        state = manager.state()
        try:
            copy = json.loads(json.dumps(state))
        except (TypeError, ValueError) as cause:
            self.problems.append(f"state() is not JSON: {cause}")
            return
        other = self.build(self.context)
        other.restore(copy)
        if other.state() != state:
            self.problems.append("state() of a manager is not what restore() was given")
        await asyncio.wait_for(other.close(), WAIT_S)


class _UpstreamError(Exception):
    """Raised by the stream on purpose."""
