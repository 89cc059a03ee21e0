"""The suites of workers are red on workers that break a promise: for each check one that only it is about."""

import asyncio
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rlcore.testing import leaks
from rlcore.testing.null import NullActor, NullReference, NullReplica, NullRollout
from rlcore.testing.null_critic import NullCritic
from rlcore.testing.suites.actor import ActorWorkerSuite
from rlcore.testing.suites.critic import CriticWorkerSuite
from rlcore.testing.suites.harness import all_checks, failures
from rlcore.testing.suites.reference import ReferenceWorkerSuite
from rlcore.testing.suites.rollout import RolloutWorkerSuite
from rlcore.types import FinishReason, Sampling

OPEN: list[int] = []


class Untidy(NullActor):
    def setup(self):
        super().setup()
        OPEN.append(os.open("/dev/null", os.O_RDONLY))


class NoArguments(NullActor):
    def update(self):
        return {}


class ClosesEngine(NullActor):
    def setup(self):
        self.engine = self

    def close(self):
        self.engine.is_closed = True


def per_token(change):
    """An actor whose log-probs are changed."""

    class Changed(NullActor):
        def logprobs(self, batch):
            return change(super().logprobs(batch))

    return Changed


class OtherScores(NullActor):
    def token_scores(self, batch):
        found = super().token_scores(batch)
        return replace(found, logprobs_BT=found.logprobs_BT - np.float32(1))


class EntropyInBits(NullActor):
    def token_scores(self, batch):
        found = super().token_scores(batch)
        return replace(found, entropy_BT=found.entropy_BT / np.float32(np.log(2)))


class Drifts(NullActor):
    def logprobs(self, batch):
        self.logits_V = self.logits_V + 1e-3 * np.arange(len(self.logits_V))
        return super().logprobs(batch)


class Idle(NullActor):
    def _adam(self, gradient_V):
        pass


class Uphill(NullActor):
    def _adam(self, gradient_V):
        super()._adam(-gradient_V)


class SaysNothing(NullActor):
    def update(self, minibatch):
        super().update(minibatch)


class TakesNan(NullActor):
    def _skip(self):
        self.logits_V = self.logits_V + 1.0 * np.arange(len(self.logits_V))
        return {"actor/skipped": 1.0}


class CountsNothing(NullActor):
    def _skip(self):
        return {}


class ForgetsMoments(NullActor):
    def restore(self, directory):
        super().restore(directory)
        self.moment1_V = np.zeros_like(self.moment1_V)


class CopiesNothing(NullActor):
    async def write_snapshot(self, directory):
        self.save(directory)


class CopiesNoValues(NullCritic):
    async def write_snapshot(self, directory):
        self.save(directory)


class ForgetsWeights(NullActor):
    def restore(self, directory):
        pass


class NoFacts(NullActor):
    def facts(self):
        return {}


class Publishes(NullActor):
    def publish(self, version):
        return version


class OtherVersion(NullActor):
    def weights(self, version, directory):
        return replace(super().weights(version, directory), version=version + 1)


class Elsewhere(NullActor):
    def weights(self, version, directory):
        return replace(super().weights(version, directory), path=str(directory / "elsewhere"))


def reference(change):
    """A reference whose log-probs are changed."""

    class Changed(NullReference):
        def logprobs(self, batch):
            return change(super().logprobs(batch))

    return Changed


class Random(NullReference):
    def logprobs(self, batch):
        found_BT = super().logprobs(batch)
        return (found_BT - np.random.default_rng().random()).astype(np.float32)


class Follows(NullReference):
    def logprobs(self, batch):
        return self.context.host.logprobs(batch)


def by_row(found_BT):
    return found_BT - 0.01 * np.arange(len(found_BT), dtype=np.float32)[:, None]


class ValuesEverywhere(NullCritic):
    def values(self, batch):
        return super().values(batch) + np.float32(1)


class ValuesByRow(NullCritic):
    def values(self, batch):
        mask_BT = batch.tokens.loss_mask_BT
        return np.where(mask_BT, by_row(super().values(batch)), 0).astype(np.float32)


def looking_back(num):
    """A critic whose values depend on the token that many positions earlier; 1 is right."""

    class LooksBack(NullCritic):
        def values(self, batch):
            mask_BT = batch.tokens.loss_mask_BT
            seen_BT = np.roll(batch.tokens.token_ids_BT, num, axis=1) / 1000
            return np.where(mask_BT, super().values(batch) + seen_BT, 0).astype(np.float32)

    return LooksBack


class Stale(NullCritic):
    def values(self, batch):
        return np.roll(super().values(batch), 1, axis=1) * batch.tokens.loss_mask_BT


class NeverLearns(NullCritic):
    def _update(self, minibatch, returns_BT):
        return {"critic/loss": 0.0}


class RestoresNothing(NullCritic):
    def restore(self, directory):
        pass


def rollout(change, base=NullRollout):
    """A rollout whose completions are changed, or left out."""

    class Changed(base):
        async def generate(self, requests):
            async for completion in super().generate(requests):
                if (found := change(completion)) is not None:
                    yield found

    return Changed


class SeedsByPlace(NullRollout):
    async def generate(self, requests):
        moved = [replace(request, seed=request.seed + 10 * index) for index, request in enumerate(requests)]
        async for completion in super().generate(moved):
            yield completion


class OneSeed(NullRollout):
    async def generate(self, requests):
        async for completion in super().generate([replace(request, seed=0) for request in requests]):
            yield completion


def sampling_with(change, base=NullRollout):
    """A rollout that changes the sampling of its requests."""

    class Changed(base):
        async def generate(self, requests):
            changed = [replace(request, sampling=change(request.sampling)) for request in requests]
            async for completion in super().generate(changed):
                yield completion

    return Changed


def never_greedy(sampling):
    return replace(sampling, temperature=1.0)


def one_temperature(sampling):
    return replace(sampling, temperature=1.0 if sampling.temperature else 0.0)


def shifted(completion):
    return replace(completion, logprobs=np.roll(completion.logprobs, 1))


def constant(completion):
    return replace(completion, logprobs=np.full_like(completion.logprobs, -0.5))


class BreaksWhenClosed(NullRollout):
    broken = False

    async def generate(self, requests):
        if self.broken:
            return
        self.broken = True
        async for completion in super().generate(requests):
            await asyncio.sleep(0.001)
            yield completion
        self.broken = False


class NoWords(NullRollout):
    async def health(self):
        return ""


class IgnoresWeights(NullReplica):
    async def load_weights(self, handle):
        return handle.version


class OnlyNotesTheVersion(NullReplica):
    async def load_weights(self, handle):
        self._version = handle.version
        return handle.version


class NeverSleeps(NullReplica):
    async def sleep(self):
        pass


HOSTED = {"host": NullActor}
SHAPE = "test_logprobs_are_one_number_a_token"
ROWS = "test_logprobs_of_a_row_do_not_depend_on_the_others"
SAVED = "test_what_was_saved_is_restored_bit_for_bit"
COPIED = "test_a_snapshot_is_written_as_it_was_taken"
LEARNS = "test_an_update_makes_what_was_good_more_likely"
SKIPS = "test_a_gradient_that_is_not_finite_is_skipped_and_counted"
SCORES = "test_token_scores_are_the_same_logprobs_with_their_entropy"
WHOLE = "test_a_completion_is_whole"
GREEDY = Sampling(temperature=0.0, max_tokens=6)
"""The setting of a backend that takes top_k=1 for greedy: its log-probs are those of the whole vocabulary."""
TOP = "test_top_k_of_1_is_greedy"
STOPS = "test_a_row_ends_at_a_stop_string"
HOST = "test_it_samples_with_the_version_that_its_host_published"
HANDED = "test_it_samples_with_the_weights_it_was_handed"
WEIGHTS = "test_weights_are_written_under_their_version"
ACTOR = [
    (NoArguments, "test_it_is_what_its_role_calls_for"),
    (ClosesEngine, "test_it_closes_also_without_a_setup"),
    (Untidy, "test_it_starts_and_ends_without_leaving_anything"),
    (per_token(lambda found_BT: found_BT + 9), SHAPE),
    (per_token(lambda found_BT: found_BT.astype(np.float64)), SHAPE),
    (per_token(lambda found_BT: found_BT[:, 1:]), SHAPE),
    (per_token(by_row), ROWS),
    (OtherScores, SCORES),
    (EntropyInBits, SCORES),
    (Idle, LEARNS),
    (Uphill, LEARNS),
    (SaysNothing, LEARNS),
    (Drifts, "test_logprobs_change_nothing"),
    (TakesNan, SKIPS),
    (CountsNothing, SKIPS),
    (ForgetsMoments, SAVED),
    (ForgetsWeights, SAVED),
    (CopiesNothing, COPIED),
    (NoFacts, "test_it_knows_itself_and_takes_a_version"),
    (Publishes, "test_it_knows_itself_and_takes_a_version"),
    (OtherVersion, WEIGHTS),
    (Elsewhere, WEIGHTS),
]
REFERENCE = [
    (reference(lambda found_BT: -found_BT), SHAPE),
    (reference(by_row), ROWS),
    (Random, "test_its_weights_are_frozen"),
    (Follows, "test_updates_of_its_host_do_not_reach_it"),
]
BELONGS = "test_a_value_belongs_to_the_tokens_before_it"
CRITIC = [
    (ValuesEverywhere, "test_values_are_one_number_a_sampled_token"),
    (ValuesByRow, "test_values_of_a_row_do_not_depend_on_the_others"),
    (looking_back(0), BELONGS),
    (looking_back(2), BELONGS),
    (NeverLearns, "test_updates_bring_values_to_the_returns"),
    (Stale, "test_updates_bring_values_to_the_returns"),
    (RestoresNothing, SAVED),
    (CopiesNoValues, COPIED),
]
ROLLOUT = [
    (
        rollout(lambda completion: completion if completion.sample else None),
        "test_every_sample_of_every_request_comes_once",
    ),
    (rollout(lambda trajectory: replace(trajectory, logprobs=-trajectory.logprobs)), WHOLE),
    (rollout(lambda completion: replace(completion, token_ids=completion.token_ids + np.int32(9000))), WHOLE),
    (rollout(lambda trajectory: replace(trajectory, logprobs=trajectory.logprobs[1:])), WHOLE),
    (rollout(lambda sample: replace(sample, finish="length")), WHOLE),
    (SeedsByPlace, "test_the_order_of_requests_changes_nothing"),
    (OneSeed, "test_seeds_decide_what_is_sampled"),
    (sampling_with(never_greedy), "test_greedy_samples_are_equal"),
    (sampling_with(lambda sampling: replace(sampling, top_k=0)), TOP),
    (sampling_with(lambda sampling: GREEDY if sampling.top_k else sampling), TOP),
    (sampling_with(lambda sampling: replace(sampling, stop=())), STOPS),
    (sampling_with(lambda sampling: replace(sampling, stop=tuple(text + "x" for text in sampling.stop))), STOPS),
    (rollout(lambda completion: replace(completion, finish=FinishReason.LENGTH)), STOPS),
    (BreaksWhenClosed, "test_a_stream_that_is_closed_early_disturbs_no_other"),
    (NoWords, "test_it_says_what_it_serves"),
    (rollout(lambda sample: replace(sample, version=0)), HOST),
    (rollout(shifted), HOST),
    (rollout(constant), HOST),
    (sampling_with(one_temperature), HOST),
]
REPLICA = [
    (IgnoresWeights, HANDED),
    (OnlyNotesTheVersion, HANDED),
    (rollout(shifted, NullReplica), HANDED),
    (rollout(constant, NullReplica), HANDED),
    (sampling_with(one_temperature, NullReplica), HANDED),
    (NeverSleeps, "test_it_serves_no_request_while_it_sleeps"),
]
CLAIMS: dict[type, dict[str, Any]] = {
    ActorWorkerSuite: {"hands_out_weights": True},
    ReferenceWorkerSuite: HOSTED,
    CriticWorkerSuite: {},
    RolloutWorkerSuite: HOSTED,
}
MUTANTS = [
    *((ActorWorkerSuite, CLAIMS[ActorWorkerSuite], *row) for row in ACTOR),
    *((ReferenceWorkerSuite, HOSTED, *row) for row in REFERENCE),
    *((CriticWorkerSuite, {}, *row) for row in CRITIC),
    *((RolloutWorkerSuite, HOSTED, *row) for row in ROLLOUT),
    *((RolloutWorkerSuite, {"actor": NullActor, "sleeps": True}, *row) for row in REPLICA),
]


@pytest.fixture(autouse=True)
def _what_is_left_open_is_found_soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(leaks, "PATIENCE_S", 0.1)
    yield
    while OPEN:
        os.close(OPEN.pop())


@pytest.mark.parametrize(("suite", "claims", "mutant", "check"), MUTANTS)
def test_a_broken_worker_is_red(suite: Any, claims: dict[str, Any], mutant: type, check: str) -> None:
    tested = type("Tested", (suite,), {"target": mutant, **claims})
    assert check in failures(tested, [check])


def test_a_critic_whose_values_depend_on_the_token_before_is_green() -> None:
    assert failures(type("Tested", (CriticWorkerSuite,), {"target": looking_back(1)}), [BELONGS]) == {}


@pytest.mark.parametrize("suite", CLAIMS)
def test_every_check_has_a_mutant(suite: Any) -> None:
    shared = {"test_it_is_what_its_role_calls_for", *(check for _, check in ACTOR[1:3])}
    assert set(all_checks(suite)) - shared == {check for mutant, _, _, check in MUTANTS if mutant is suite} - shared
