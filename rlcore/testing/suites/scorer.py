"""The suite of scorers: named components of a reward, which a manager weights and sums."""

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from rlcore.contracts.offers import Scope
from rlcore.contracts.scorer import Outcome
from rlcore.errors.checks.arrays import POLICIES
from rlcore.testing.rewards import make_prompt, make_trajectory
from rlcore.testing.suites.harness import ContextSuite, extra, run
from rlcore.types import Lane, RewardStatus, Trajectory

T = TypeVar("T")


class ScorerSuite(ContextSuite):
    """A scorer; `target` is an async generator function of a `BuildContext` that yields the scorer, started."""

    answer: Any = "7"
    """The prompt's known answer."""
    responses: Sequence[str] = ("", "The answer is 7.", "no", "eight words and more, but not a number")
    """Responses to score; any outcome passes."""
    known_good: Sequence[str] = ()
    known_bad: Sequence[str] = ()
    """Claim: each scores below every one of `known_good`."""
    failing: Sequence[str] = ()
    """Claim: responses whose outcome is FAILED with an error."""
    deterministic: bool = True
    """Claim: two calls with the same sample give the same outcome."""

    def use(self, work: Callable[[Any], Awaitable[T]]) -> T:
        """The result of `work` with the started scorer."""

        @asynccontextmanager
        async def scorer(context: Any) -> AsyncIterator[Any]:
            async for reward in self.load()(context):
                yield reward

        async def main() -> T:
            async with self.context() as context, scorer(context) as started:
                return await work(started)

        return run(main())

    def samples(self, responses: Sequence[str]) -> list[Trajectory]:
        """A group with these responses."""
        prompt = make_prompt(0, self.answer)
        return [make_trajectory(prompt, index, response) for index, response in enumerate(responses)]

    async def ask(self, scorer: Any, responses: Sequence[str], lane: Lane = Lane.TRAIN) -> list[Outcome]:
        """Outcomes as a manager gets them: one call per sample, or one for the group."""
        samples = self.samples(responses)
        calls = [[sample] for sample in samples] if scorer.scope == "sample" else [samples]
        found = []
        for call in calls:
            outcomes = await scorer.score(call, lane)
            good = isinstance(outcomes, list) and all(isinstance(outcome, Outcome) for outcome in outcomes)
            self.need(good, f"score() returned {outcomes!r:.80}; needs a list of Outcome")
            self.need(len(outcomes) == len(call), f"score() gave {len(outcomes)} outcomes for {len(call)} samples")
            found += outcomes
        return found

    def test_it_says_what_it_is(self) -> None:
        """It has name, scope, weight, failure policy and `post_processes`."""

        async def main(scorer: Any) -> None:
            self.need(isinstance(scorer.name, str) and bool(scorer.name), f"name is {scorer.name!r}; needs a name")
            scopes = [scope.value for scope in Scope]
            self.need(scorer.scope in scopes, f"scope is {scorer.scope!r}; choose from: {', '.join(scopes)}")
            good = isinstance(scorer.weight, (int, float)) and math.isfinite(scorer.weight)
            self.need(good, f"weight is {scorer.weight!r}; needs a finite number")
            policy = scorer.on_failure
            self.need(policy in ("", *POLICIES), f"on_failure is {policy!r}; choose from: {', '.join(POLICIES)}")
            later = scorer.post_processes
            self.need(isinstance(later, bool), f"post_processes is {later!r}; needs True or False")

        self.use(main)

    def test_every_sample_gets_an_outcome(self) -> None:
        """The outcome is a finite score, no opinion, or a failure with its reason; in both lanes."""

        async def main(scorer: Any) -> None:
            for lane in Lane:
                for answer in await self.ask(scorer, self.responses, lane):
                    self._is_whole(answer)

        self.use(main)

    def _is_whole(self, outcome: Outcome) -> None:
        self.need(isinstance(outcome.status, RewardStatus), f"status is {outcome.status!r}; needs a RewardStatus")
        number = isinstance(outcome.score, (int, float)) and math.isfinite(outcome.score)
        self.need(number, f"score is {outcome.score!r}; needs a finite number")
        if outcome.status is RewardStatus.FAILED:
            self.need(bool(outcome.error) and outcome.score == 0.0, "a FAILED outcome needs an error and score 0")

    @extra("deterministic")
    def test_it_says_the_same_twice_and_in_any_order(self) -> None:
        """Each sample keeps its score."""

        async def main(scorer: Any) -> None:
            first = _shown(await self.ask(scorer, self.responses))
            again = _shown(await self.ask(scorer, self.responses))
            self.need(first == again, f"said {first}, and then {again}; needs the same, or deterministic = False")
            back = _shown(await self.ask(scorer, self.responses[::-1]))[::-1]
            self.need(first == back, f"said {first}, and {back} in reverse order; needs the same")

        self.use(main)

    def test_a_look_at_the_group_keeps_every_sample(self) -> None:
        """`post_process` returns one outcome per sample, and failures stay failures."""

        async def main(scorer: Any) -> None:
            outcomes = await self.ask(scorer, self.responses)
            outcomes[-1] = Outcome(RewardStatus.FAILED, error="failed on purpose")
            found = await scorer.post_process(self.samples(self.responses), outcomes, Lane.TRAIN)
            good = isinstance(found, list) and len(found) == len(outcomes)
            self.need(good, f"post_process() returned {found!r:.80}; needs {len(outcomes)} outcomes")
            for outcome in found:
                self._is_whole(outcome)
            self.need(found[-1].status is RewardStatus.FAILED, "post_process() made a score of a failure")

        self.use(main)

    @extra("known_bad")
    def test_wrong_responses_score_below_right_ones(self) -> None:
        """Each of `known_bad` scores below each of `known_good`."""

        async def main(scorer: Any) -> None:
            outcomes = await self.ask(scorer, [*self.known_good, *self.known_bad])
            scores = [outcome.score if outcome.status is RewardStatus.OK else float("-inf") for outcome in outcomes]
            lowest = min(scores[: len(self.known_good)])
            for response, score in zip(self.known_bad, scores[len(self.known_good) :], strict=True):
                self.need(score < lowest, f"{response!r:.80} scores {score:g}, a right one {lowest:g}; needs less")

        self.use(main)

    @extra("failing")
    def test_what_cannot_be_judged_is_failed(self) -> None:
        """The outcome has an error; the scorer does not raise."""

        async def main(scorer: Any) -> None:
            for response in self.failing:
                [outcome] = await self.ask(scorer, [response])
                found = f"{outcome.status.value} with score {outcome.score:g}"
                self.need(outcome.status is RewardStatus.FAILED, f"{response!r:.80} is {found}; needs to be FAILED")
                self._is_whole(outcome)

        self.use(main)


def _shown(outcomes: Sequence[Outcome]) -> list[float | str]:
    return [outcome.score if outcome.status is RewardStatus.OK else outcome.status.value for outcome in outcomes]
