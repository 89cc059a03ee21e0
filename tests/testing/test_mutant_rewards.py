"""The suites of rewards are red on what breaks a promise: for each check something that only it is about."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlcore.contracts.reward_replica import RawScore, RewardReplica
from rlcore.contracts.scorer import Outcome
from rlcore.reward.functions import FunctionRewards
from rlcore.testing import leaks
from rlcore.testing.rewards import make_trajectory
from rlcore.testing.suites.harness import all_checks, checks, failures
from rlcore.testing.suites.reward_function import RewardFunctionSuite
from rlcore.testing.suites.reward_manager import RewardManagerSuite
from rlcore.testing.suites.reward_replica import RewardReplicaSuite
from rlcore.testing.suites.scorer import ScorerSuite
from rlcore.types import FrozenDict, Lane, Reward, RewardStatus, ScoredTrajectory

HERE = Path(__file__).parent.parent / "broken"
GOOD, BAD = ("The answer is 7",), ("The answer is 8",)
CLAIMS: dict[str, Any] = {
    "known_good": GOOD,
    "known_bad": BAD,
    "examples": {"it is 7": 1.0},
    "failing": ("unreadable",),
    "reads_messages": True,
}
FUNCTIONS = [
    ("rewards.py:gone", "test_it_loads_by_reference_and_needs_no_torch"),
    ("torch_rewards.py:heavy", "test_it_loads_by_reference_and_needs_no_torch"),
    ("rewards.py:raises_on_empty", "test_odd_responses_are_judged"),
    ("rewards.py:not_finite", "test_odd_responses_are_judged"),
    ("rewards.py:text_only", "test_messages_of_an_agent_are_judged"),
    ("rewards.py:draws", "test_it_says_the_same_twice"),
    ("rewards.py:counts", "test_it_says_the_same_twice"),
    ("rewards.py:centres", "test_a_batch_is_scored_as_one_by_one"),
    ("rewards.py:by_place", "test_the_order_of_samples_changes_nothing"),
    ("rewards.py:likes_wrong", "test_wrong_responses_score_below_right_ones"),
    ("rewards.py:believes", "test_injected_scores_do_not_count"),
    ("rewards.py:likes_wrong", "test_examples_have_their_scores"),
    ("rewards.py:swallows", "test_what_cannot_be_judged_is_failed"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("function", "check"), FUNCTIONS)
def test_a_broken_function_is_red(function: str, check: str) -> None:
    tested = type("Tested", (RewardFunctionSuite,), {**CLAIMS, "target": f"{HERE}/{function}"})
    assert check in failures(tested, [check])


@pytest.mark.slow
def test_a_function_that_is_as_it_should_be_is_green() -> None:
    tested = type("Tested", (RewardFunctionSuite,), {**CLAIMS, "target": f"{HERE}/rewards.py:right"})
    assert len(checks(tested)) == len(all_checks(RewardFunctionSuite))
    assert failures(tested) == {}


class Scorer:
    """A scorer that is right; mutants differ in one method."""

    name, scope, weight, on_failure, post_processes = "tested", "sample", 1.0, "", False

    async def score(self, trajectories: Sequence[Any], lane: Lane) -> list[Outcome]:
        return [self.one(trajectory) for trajectory in trajectories]

    def one(self, trajectory: Any) -> Outcome:
        if trajectory.text() == "unreadable":
            return Outcome(RewardStatus.FAILED, error="no answer can be read")
        return Outcome(RewardStatus.OK, float(trajectory.text().endswith("is 7")))

    async def post_process(self, trajectories: Any, outcomes: Sequence[Outcome], lane: Lane) -> list[Outcome]:
        return list(outcomes)


class Nameless(Scorer):
    name = ""


class OtherScope(Scorer):
    scope = "turn"


class LosesOne(Scorer):
    async def score(self, trajectories, lane):
        return []


class NoOutcome(Scorer):
    def one(self, trajectory):
        return 1.0


class NoReason(Scorer):
    def one(self, trajectory):
        return Outcome(RewardStatus.FAILED)


class Clock(Scorer):
    def one(self, trajectory):
        return Outcome(RewardStatus.OK, time.monotonic())


class Forgives(Scorer):
    async def post_process(self, trajectories, outcomes, lane):
        return [Outcome(RewardStatus.OK, outcome.score) for outcome in outcomes]


class LikesWrong(Scorer):
    def one(self, trajectory):
        return Outcome(RewardStatus.OK, 1.0 - super().one(trajectory).score)


class Zero(Scorer):
    def one(self, trajectory):
        found = super().one(trajectory)
        return replace(found, status=RewardStatus.OK, error="")


SCORERS = [
    (Nameless, "test_it_says_what_it_is"),
    (OtherScope, "test_it_says_what_it_is"),
    (LosesOne, "test_every_sample_gets_an_outcome"),
    (NoOutcome, "test_every_sample_gets_an_outcome"),
    (NoReason, "test_every_sample_gets_an_outcome"),
    (Clock, "test_it_says_the_same_twice_and_in_any_order"),
    (Forgives, "test_a_look_at_the_group_keeps_every_sample"),
    (LikesWrong, "test_wrong_responses_score_below_right_ones"),
    (Zero, "test_what_cannot_be_judged_is_failed"),
]


def scorer_suite(cls: type[Scorer]) -> Any:
    async def target(context: Any) -> Any:
        yield cls()

    claims = {"known_good": GOOD, "known_bad": BAD, "failing": ("unreadable",)}
    return type("Tested", (ScorerSuite,), {"target": target, **claims})


@pytest.mark.parametrize(("mutant", "check"), SCORERS)
def test_a_broken_scorer_is_red(mutant: type[Scorer], check: str) -> None:
    assert check in failures(scorer_suite(mutant), [check])


def test_a_scorer_that_is_as_it_should_be_is_green() -> None:
    assert failures(scorer_suite(Scorer)) == {}


def changed(change):
    """A manager whose scored trajectories are changed, or left out."""

    class Changed(FunctionRewards):
        async def score(self, stream, lane):
            async for sample in super().score(stream, lane):
                for found in change(sample):
                    yield found

    return Changed


class Unscoped(FunctionRewards):
    scope = "sample"


class Positional(FunctionRewards):
    async def score(self, stream, lane):
        completions = [completion async for completion in stream]
        for index, sample in enumerate(completions):
            yield ScoredTrajectory(sample, Reward(float(index)))


class PartsApart(FunctionRewards):
    async def score(self, stream, lane):
        async for sample in super().score(stream, lane):
            yield replace(
                sample, reward=replace(sample.reward, score=sample.reward.score + sample.trajectory.id.segment)
            )


class OneAtATime(FunctionRewards):
    busy = False

    async def score(self, stream, lane):
        if self.busy:
            return
        self.busy = True
        async for sample in super().score(stream, lane):
            yield sample
        self.busy = False


class Swallows(FunctionRewards):
    async def score(self, stream, lane):
        async def quiet():
            try:
                async for completion in stream:
                    yield completion
            except Exception:  # noqa: BLE001
                return

        async for sample in super().score(quiet(), lane):
            yield sample


class Passes(FunctionRewards):
    async def score(self, stream, lane):
        async for sample in super().score(stream, lane):
            failed = sample.reward.status is RewardStatus.FAILED
            yield replace(sample, reward=Reward(0.0)) if failed else sample


class WrongKind(FunctionRewards):
    async def metrics(self):
        return {}


class NanMetrics(FunctionRewards):
    def metrics(self):
        return {"reward/x": float("nan")}


class ClosesOnce(FunctionRewards):
    closed = False

    async def close(self):
        if self.closed:
            raise RuntimeError("closed already")
        self.closed = True
        await super().close()


class LeavesChildren(FunctionRewards):
    async def close(self):
        self._watch.close()


class ClockState(FunctionRewards):
    def state(self):
        return {"when": time.monotonic()}


class SetState(FunctionRewards):
    def state(self):
        return {"seen": {1, 2}}


ONCE = "test_each_trajectory_comes_back_once_in_either_lane_and_any_order"
MANAGERS = [
    (WrongKind, "test_it_is_what_its_slot_calls_for"),
    (NanMetrics, "test_its_metrics_are_numbers"),
    (ClosesOnce, "test_it_closes_twice_and_without_a_start"),
    (LeavesChildren, "test_it_closes_twice_and_without_a_start"),
    (ClockState, "test_its_state_survives_json"),
    (SetState, "test_its_state_survives_json"),
    (Unscoped, "test_its_scope_is_one"),
    (
        changed(lambda sample: [replace(sample, reward=replace(sample.reward, score=1.0))]),
        "test_the_weighted_parts_are_the_score",
    ),
    (changed(lambda sample: [sample] if sample.trajectory.id.sample else []), ONCE),
    (changed(lambda sample: [sample, sample]), ONCE),
    (changed(lambda sample: [replace(sample, reward=Reward(float("nan")))]), ONCE),
    (Positional, "test_each_trajectory_gets_its_own_score"),
    (Positional, "test_scores_do_not_depend_on_the_order_of_arrival"),
    (OneAtATime, "test_streams_side_by_side_do_not_mix"),
    (PartsApart, "test_parts_of_a_sample_share_its_reward"),
    (OneAtATime, "test_a_stream_that_is_closed_early_disturbs_no_other"),
    (Swallows, "test_what_the_stream_raises_passes"),
    (Passes, "test_what_cannot_be_scored_is_failed"),
]


@pytest.mark.parametrize(("mutant", "check"), MANAGERS)
def test_a_broken_manager_is_red(mutant: type, check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "PATIENCE_S", 0.1)
    claims = {"failing": (make_trajectory(9, 0, "unreadable"),), "expected": lambda sample: 0.0}
    settings = {"reward.functions.letters.fn": f"{HERE}/rewards.py:right"}
    tested = type("Tested", (RewardManagerSuite,), {"target": mutant, "settings": settings, **claims})
    assert check in failures(tested, [check])


class Replica(RewardReplica):
    """A scorer that is right: scores the length of a conversation."""

    def setup(self) -> None:
        self.awake = asyncio.Event()
        self.awake.set()

    async def score(self, requests: Sequence[Any]) -> list[RawScore]:
        await self.awake.wait()
        return [self.one(request, index) for index, request in enumerate(requests)]

    def one(self, request: Any, index: int) -> RawScore:
        length = sum(len(message["content"]) for message in request.messages)
        return RawScore(request.id, error="too long") if length > 900 else RawScore(request.id, float(length))

    async def health(self) -> str:
        return "lengths"

    async def sleep(self) -> None:
        self.awake.clear()

    async def wake(self) -> None:
        self.awake.set()


class Backwards(Replica):
    async def score(self, requests):
        return (await super().score(requests))[::-1]


class NoAnswers(Replica):
    def one(self, request, index):
        return RawScore(request.id)


class NotFinite(Replica):
    def one(self, request, index):
        return RawScore(request.id, float("nan"))


class ByPlace(Replica):
    def one(self, request, index):
        return RawScore(request.id, float(index))


class FailsAll(Replica):
    async def score(self, requests):
        found = await super().score(requests)
        return (
            [replace(result, score=None, error="bad") for result in found]
            if any(task.error for task in found)
            else found
        )


class Unwell(Replica):
    async def health(self):
        return None


class NeverWakes(Replica):
    async def wake(self):
        self.awake = None


class NeverSleeps(Replica):
    async def sleep(self):
        pass


REPLICAS = [
    (Backwards, "test_each_request_is_answered_in_order"),
    (NoAnswers, "test_each_request_is_answered_in_order"),
    (NotFinite, "test_each_request_is_answered_in_order"),
    (ByPlace, "test_a_batch_is_answered_as_one_by_one"),
    (FailsAll, "test_what_is_wrong_with_a_request_is_its_own_error"),
    (Unwell, "test_it_says_what_it_serves"),
    (NeverWakes, "test_it_serves_again_after_it_slept"),
    (NeverSleeps, "test_it_answers_nothing_while_it_sleeps"),
]
LONG = (FrozenDict({"role": "user", "content": "x" * 1000}),)


def replica_suite(cls: type[Replica]) -> Any:
    return type("Tested", (RewardReplicaSuite,), {"target": cls, "unreadable": LONG, "sleeps": True})


@pytest.mark.parametrize(("mutant", "check"), REPLICAS)
def test_a_broken_replica_is_red(mutant: type[Replica], check: str) -> None:
    assert check in failures(replica_suite(mutant), [check])


@pytest.mark.slow
def test_a_replica_that_is_as_it_should_be_is_green() -> None:
    assert failures(replica_suite(Replica)) == {}


@pytest.mark.parametrize(
    ("suite", "rows"),
    [
        (RewardFunctionSuite, FUNCTIONS),
        (ScorerSuite, SCORERS),
        (RewardManagerSuite, MANAGERS),
        (RewardReplicaSuite, REPLICAS),
    ],
)
def test_every_check_has_a_mutant(suite: Any, rows: Any) -> None:
    shared = {
        "test_it_is_what_its_role_calls_for",
        "test_it_closes_also_without_a_setup",
        "test_it_starts_and_ends_without_leaving_anything",
    }
    assert set(all_checks(suite)) - shared == {check for _, check in rows}
