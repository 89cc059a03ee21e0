"""The suite of reward managers."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import numpy as np

from rlcore.contracts.offers import Scope
from rlcore.contracts.reward_manager import RewardManager
from rlcore.testing.rewards import make_trajectory, score_all, stream_of
from rlcore.testing.suites.harness import ComponentSuite, extra
from rlcore.types import Lane, Reward, RewardStatus, ScoredTrajectory, Trajectory, TrajectoryId

GROUP = 4
DEFAULTS: Mapping[str, Any] = {
    "rollout.samples_per_prompt": GROUP,
    "eval.sources.held.path": "prompts.jsonl",
    "eval.samples_per_prompt": GROUP,
    "eval.temperature": 1.0,
}


class RewardManagerSuite(ComponentSuite):
    """A reward manager; `target` is its `build`."""

    interface = RewardManager
    defaults = DEFAULTS
    trajectories: Sequence[Trajectory] = ()
    """Whole groups of four samples; empty: two groups."""
    expected: Callable[[Trajectory], float] | None = None
    """Claim: the right score of a trajectory."""
    failing: Sequence[Trajectory] = ()
    """Claim: samples that cannot be scored; their rewards are FAILED."""

    def samples(self) -> list[Trajectory]:
        """The trajectories to score."""
        own = [make_trajectory(prompt, sample) for prompt in range(2) for sample in range(GROUP)]
        return list(self.trajectories) or own

    async def warm_up(self, component: Any) -> None:
        """Score one step."""
        await score_all(component, self.samples())

    def test_its_scope_is_one(self) -> None:
        """`scope` is a `Scope`."""

        async def main(manager: RewardManager) -> None:
            self.need(isinstance(manager.scope, Scope), f"scope is {manager.scope!r}; needs a Scope")

        self.use(main)

    def test_the_weighted_parts_are_the_score(self) -> None:
        """The score is the sum of the components that `weights` names, times their weights. Without `weights` it may be
        any number."""

        async def main(manager: RewardManager) -> None:
            weights = manager.weights
            for sample in await score_all(manager, self.samples()) if weights else ():
                score, parts = sample.reward.score, sample.reward.components
                total = math.fsum(weight * parts.get(name, 0.0) for name, weight in weights.items())
                good = math.isclose(score, total, rel_tol=1e-6, abs_tol=1e-6)
                self.need(good, f"{sample.trajectory.id}: scored {score}; components times `weights` are {total}")

        self.use(main)

    def test_each_trajectory_comes_back_once_in_either_lane_and_any_order(self) -> None:
        """Each has its own tokens and a finite score."""

        async def main(manager: RewardManager) -> None:
            for lane, step in ((Lane.TRAIN, 1), (Lane.EVAL, -1)):
                samples = self.samples()[::step]
                self._are_whole(samples, await score_all(manager, samples, lane))

        self.use(main)

    def _are_whole(self, samples: Sequence[Trajectory], scored: Sequence[ScoredTrajectory]) -> None:
        for sample in scored:
            self.need(isinstance(sample, ScoredTrajectory), f"score() gave {sample!r:.60}; needs ScoredTrajectory")
        found, wanted = sorted(sample.trajectory.id for sample in scored), sorted(sample.id for sample in samples)
        self.need(found == wanted, f"of {len(wanted)} trajectories came back {len(found)}, not each once")
        by_id = {sample.id: sample for sample in samples}
        for sample in scored:
            self._is_whole(sample.reward, sample.trajectory, by_id[sample.trajectory.id])

    def _is_whole(self, reward: Reward, found: Trajectory, original: Trajectory) -> None:
        name = found.id
        same = np.array_equal(found.token_ids, original.token_ids)
        self.need(same, f"{name}: came back with other tokens than it went in with")
        good = reward.status is RewardStatus.OK
        self.need(good, f"{name}: status {reward.status}: {reward.info.get('error')}")
        self.need(math.isfinite(reward.score), f"{name}: the score is {reward.score}; needs a finite number")

    @extra("expected")
    def test_each_trajectory_gets_its_own_score(self) -> None:
        """Scores are not mixed up between trajectories."""
        due: Any = loaded_function(type(self).expected)

        async def main(manager: RewardManager) -> None:
            for sample in await score_all(manager, self.samples()):
                score, wanted = sample.reward.score, due(sample.trajectory)
                good = math.isclose(score, wanted, rel_tol=1e-6)
                self.need(good, f"{sample.trajectory.id}: scored {score}, not {wanted}: another one's reward?")

        self.use(main)

    def test_scores_do_not_depend_on_the_order_of_arrival(self) -> None:
        """Each trajectory keeps its own score."""

        async def main(manager: RewardManager) -> None:
            samples = self.samples()
            shuffled = [samples[index] for index in np.random.default_rng(0).permutation(len(samples))]
            one, other = [by_id(await score_all(manager, queue, Lane.EVAL)) for queue in (samples, shuffled)]
            self.need(one == other, f"scores {one}, and {other} where they arrive in another order")

        self.use(main)

    def test_streams_side_by_side_do_not_mix(self) -> None:
        """Two steps and an evaluation run at the same time."""

        async def main(manager: RewardManager) -> None:
            samples = self.samples()
            # the same prompts again, as in later epochs
            later = [replace(sample, id=replace(sample.id, epoch=1)) for sample in samples]
            streams = ((samples, Lane.TRAIN), (later, Lane.TRAIN), (samples, Lane.EVAL))
            found = await asyncio.gather(*(score_all(manager, request, lane) for request, lane in streams))
            for (request, _), scored in zip(streams, found, strict=True):
                self._are_whole(request, scored)

        self.use(main)

    def test_parts_of_a_sample_share_its_reward(self) -> None:
        """Each segment comes back once."""

        async def main(manager: RewardManager) -> None:
            first = self.samples()[0]
            group = [sample for sample in self.samples() if sample.id.prompt == first.id.prompt][1:]
            parts = [replace(first, id=replace(first.id, segment=part), num_segments=2) for part in (1, 0)]
            scored = [
                sample
                for sample in await score_all(manager, [*parts, *group])
                if sample.trajectory.id.unit() == first.id
            ]
            found = sorted(sample.trajectory.id.segment for sample in scored)
            self.need(found == [0, 1], f"of a sample of two parts came back {found}; needs each part once")
            scores = {sample.reward.score for sample in scored}
            self.need(len(scores) == 1, f"two parts of a sample have the rewards {sorted(scores)}; needs one")

        self.use(main)

    def test_a_stream_that_is_closed_early_disturbs_no_other(self) -> None:
        """The next stream is scored in full."""

        async def main(manager: RewardManager) -> None:
            async with aclosing(manager.score(stream_of(self.samples()), Lane.TRAIN)) as results:  # type: ignore[type-var]
                async for _ in results:
                    break
            self._are_whole(self.samples(), await score_all(manager, self.samples()))

        self.use(main)

    def test_what_the_stream_raises_passes(self) -> None:
        """An error of the agent loop is raised unchanged."""

        async def main(manager: RewardManager) -> None:
            async def broken() -> AsyncIterator[Trajectory]:
                yield self.samples()[0]
                raise _UpstreamError

            try:
                async with aclosing(manager.score(broken(), Lane.TRAIN)) as results:  # type: ignore[type-var]
                    async for _ in results:
                        pass
            except _UpstreamError:
                return
            self.need(False, "an error of the stream of trajectories is swallowed; needs to pass")

        self.use(main)

    @extra("failing")
    def test_what_cannot_be_scored_is_failed(self) -> None:
        """The reward has score 0 and info['error']; the manager does not raise."""

        async def main(manager: RewardManager) -> None:
            for function in self.failing:
                [scored] = await score_all(manager, [function], Lane.EVAL)
                reward = scored.reward
                failed = reward.status is RewardStatus.FAILED and reward.score == 0.0
                self.need(failed, f"{function.id}: must be FAILED with score 0, is {reward.status} with {reward.score}")
                self.need(bool(reward.info.get("error")), f"{function.id}: FAILED without info['error']")

        self.use(main)


def by_id(scored: Sequence[ScoredTrajectory]) -> dict[TrajectoryId, float]:
    """The scores by trajectory id."""
    return {
        sample.trajectory.id: sample.reward.score for sample in sorted(scored, key=lambda score: score.trajectory.id)
    }


def loaded_function(value: Any) -> Any:
    """A function that is a class attribute."""
    return value.__func__ if isinstance(value, staticmethod) else value


class _UpstreamError(Exception):
    """Raised by the stream on purpose."""
