"""The suites of components and pools are red on what breaks a promise: for each check something broken."""

import json
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rlcore.agents.single_turn import SingleTurn
from rlcore.contracts.critic import CriticEngine
from rlcore.contracts.offers import PoolSpec
from rlcore.contracts.requests import Role, WorkerRequest
from rlcore.contracts.reward_replica import RewardReplica
from rlcore.testing.suites.agents import AgentLoopSuite
from rlcore.testing.suites.critic import CriticEngineSuite
from rlcore.testing.suites.harness import all_checks, failures
from rlcore.testing.suites.pool import ResourcePoolSuite
from rlcore.types import FinishReason, Lane, Sampling, TrajectoryId

LIFE = {
    "test_it_is_what_its_slot_calls_for",
    "test_it_closes_twice_and_without_a_start",
    "test_its_state_survives_json",
    "test_its_metrics_are_numbers",
}
"""Of every component; the managers' mutants show each."""


def changed(change):
    """An agent whose trajectories are changed, or left out."""

    class Changed(SingleTurn):
        async def rollout(self, tasks, sampling, lane):
            async for trajectory in super().rollout(tasks, sampling, lane):
                for found in change(trajectory):
                    yield found

    return Changed


class Retokenises(SingleTurn):
    async def rollout(self, tasks, sampling, lane):
        async for trajectory in super().rollout(tasks, sampling, lane):
            ids_T = np.where(trajectory.loss_mask, np.roll(trajectory.token_ids, 1), trajectory.token_ids).astype(
                np.int32
            )
            yield replace(trajectory, token_ids=ids_T)


class PairsOthersLogprobs(SingleTurn):
    async def rollout(self, tasks, sampling, lane):
        async for trajectory in super().rollout(tasks, sampling, lane):
            yield replace(
                trajectory, logprobs=np.where(trajectory.loss_mask, trajectory.logprobs[::-1] - 1, 0).astype(np.float32)
            )


def without_end(row):
    return replace(row, token_ids=row.token_ids[:-2], loss_mask=row.loss_mask[:-2], logprobs=row.logprobs[:-2])


def last_tokens(row):
    """The row without the prompt's first tokens, as if the response had followed the last two."""
    start = row.prompt_length - 2
    moved = tuple((place - start, version) for place, version in row.versions)
    arrays = {name: getattr(row, name)[start:] for name in ("token_ids", "loss_mask", "logprobs")}
    return replace(row, versions=moved, **arrays)


def schemas_of(change):
    """An agent with other schemas of tools."""

    class Schemas(SingleTurn):
        async def tool_schemas(self, prompts):
            return change(prompts)

    return Schemas


class SeedsByPlace(SingleTurn):
    async def rollout(self, tasks, sampling, lane):
        moved = [replace(task, seed=task.seed + 10 * index) for index, task in enumerate(tasks)]
        async for trajectory in super().rollout(moved, sampling, lane):
            yield trajectory


class OneSeed(SingleTurn):
    async def rollout(self, tasks, sampling, lane):
        async for trajectory in super().rollout([replace(task, seed=0) for task in tasks], sampling, lane):
            yield trajectory


class OneAtATime(SingleTurn):
    busy = False

    async def rollout(self, tasks, sampling, lane):
        if self.busy:
            return
        self.busy = True
        async for trajectory in super().rollout(tasks, sampling, lane):
            yield trajectory
        self.busy = False


def requesting(change):
    """An agent that changes the sampling and the lane of its requests."""

    class Requesting(SingleTurn):
        async def rollout(self, tasks, sampling, lane):
            async for trajectory in super().rollout(tasks, *change(sampling, lane)):
                yield trajectory

    return Requesting


def with_sampling(**fields):
    return requesting(lambda sampling, lane: (replace(sampling, **fields), lane))


class StateOfNow(SingleTurn):
    def state(self):
        return {"now": time.monotonic()}


def holding(state):
    """An agent with this state, which reads whole numbers back from keys."""

    class Holding(SingleTurn):
        def __init__(self, generator, tokens):
            super().__init__(generator, tokens)
            self.held = {}

        async def rollout(self, tasks, sampling, lane):
            self.held = state
            async for trajectory in super().rollout(tasks, sampling, lane):
                yield trajectory

        def state(self):
            return self.held

        def restore(self, state):
            self.held = {int(key) if key.isdecimal() else key: value for key, value in state.items()}

    return Holding


class LoudMetrics(SingleTurn):
    def metrics(self):
        return {"agent/turns": "three"}


SCHEMAS = "test_each_prompt_has_its_schemas"
COMPLETE = "test_every_task_gets_its_samples"
SETTINGS = "test_requests_have_the_settings_and_the_lane_of_their_rollout"
WHOLE = "test_arrays_speak_of_the_same_tokens"
CUT = "test_a_response_that_the_budget_cuts_says_so"
TEXT = "test_the_text_is_what_was_sampled"
SAMPLED = "test_tokens_are_trained_as_they_were_sampled"
AGENTS = [
    (changed(lambda trajectory: [trajectory] if trajectory.id.sample else []), COMPLETE),
    (changed(lambda sample: [sample, sample]), COMPLETE),
    (changed(lambda sample: [None]), COMPLETE),
    (changed(lambda trajectory: [replace(trajectory, id=TrajectoryId("another", 0, trajectory.id.sample))]), COMPLETE),
    (changed(lambda sample: [replace(sample, num_segments=2)]), COMPLETE),
    (changed(lambda sample: [replace(sample, prompt=replace(sample.prompt, answer="changed"))]), COMPLETE),
    (schemas_of(lambda prompts: [()] * (len(prompts) - 1)), SCHEMAS),
    (schemas_of(lambda prompts: [[{"type": {1, 2}}]] * len(prompts)), SCHEMAS),
    (requesting(lambda sampling, lane: (Sampling(max_tokens=sampling.max_tokens, stop=sampling.stop), lane)), SETTINGS),
    *((with_sampling(**{name: 1}), SETTINGS) for name in ("temperature", "top_p", "top_k", "min_p")),
    (with_sampling(max_tokens=401), SETTINGS),
    (with_sampling(stop=("\n",)), SETTINGS),
    (requesting(lambda sampling, lane: (sampling, Lane.TRAIN)), SETTINGS),
    (changed(lambda completion: [replace(completion, token_ids=completion.token_ids.astype(np.int64))]), WHOLE),
    (changed(lambda trajectory: [replace(trajectory, loss_mask=trajectory.loss_mask[1:])]), WHOLE),
    (changed(lambda trajectory: [replace(trajectory, logprobs=trajectory.logprobs - 1)]), WHOLE),
    (changed(lambda trajectory: [replace(trajectory, loss_mask=np.ones_like(trajectory.loss_mask))]), WHOLE),
    (changed(lambda sample: [replace(sample, versions=())]), WHOLE),
    (changed(lambda sample: [replace(sample, versions=((sample.versions[0][0], 9),))]), WHOLE),
    (Retokenises, SAMPLED),
    (changed(lambda trajectory: [without_end(trajectory)]), SAMPLED),
    (PairsOthersLogprobs, SAMPLED),
    (changed(lambda trajectory: [last_tokens(trajectory)]), SAMPLED),
    (changed(lambda sample: [replace(sample, finish=FinishReason.STOP)]), CUT),
    (changed(lambda sample: [replace(sample, completion="always this")]), TEXT),
    (changed(lambda sample: [replace(sample, completion=({"role": "assistant", "content": "always"},))]), TEXT),
    (SeedsByPlace, "test_seeds_decide_what_is_sampled"),
    (OneSeed, "test_seeds_decide_what_is_sampled"),
    (OneAtATime, "test_rollouts_side_by_side_do_not_mix"),
    (OneAtATime, "test_a_rollout_that_is_closed_early_disturbs_no_other"),
    (StateOfNow, "test_its_state_survives_json"),
    (holding({"best": float("-inf")}), "test_its_state_survives_json"),
    (holding({3: 5}), "test_its_state_survives_json"),
    (LoudMetrics, "test_its_metrics_are_numbers"),
]


@pytest.mark.parametrize(("mutant", "check"), AGENTS)
def test_a_broken_agent_is_red(mutant: type, check: str) -> None:
    def target(context: Any) -> Any:
        return mutant(context.generator, context.tokens)

    assert check in failures(type("Tested", (AgentLoopSuite,), {"target": target}), [check])


def test_an_agent_may_request_fewer_tokens_and_further_stop_strings() -> None:
    agent = requesting(lambda sampling, lane: (replace(sampling, max_tokens=300, stop=("\n", *sampling.stop)), lane))

    def target(context: Any) -> Any:
        return agent(context.generator, context.tokens)

    assert failures(type("Tested", (AgentLoopSuite,), {"target": target})) == {}


class Critic(CriticEngine):
    """A critic that is right: one value for every token."""

    def __init__(self) -> None:
        self.value = 0.0

    async def values(self, batch):
        return np.where(batch.tokens.loss_mask_BT, self.value, 0).astype(np.float32)

    async def update(self, minibatch):
        mask_BT = minibatch.tokens.loss_mask_BT
        self.value += 0.5 * (float(minibatch.returns_BT[mask_BT].mean()) - self.value)
        return {"critic/loss": self.value}

    def actor_may_update(self):
        return True

    async def save(self, directory):
        (directory / "value.json").write_text(json.dumps(self.value))

    async def restore(self, directory):
        self.value = json.loads((directory / "value.json").read_text())


class Everywhere(Critic):
    async def values(self, batch):
        return np.ones(batch.tokens.token_ids_BT.shape, dtype=np.float32)


class Peeks(Critic):
    async def values(self, batch):
        ids_BT = batch.tokens.token_ids_BT / 1000
        return np.where(batch.tokens.loss_mask_BT, await super().values(batch) + ids_BT, 0).astype(np.float32)


class NotFinite(Critic):
    async def values(self, batch):
        return await super().values(batch) + np.float32("nan")


class NoValues(Critic):
    async def values(self, batch):
        return None


class NoMetrics(Critic):
    async def update(self, minibatch):
        await super().update(minibatch)


class Idle(Critic):
    async def update(self, minibatch):
        return {}


class SavesNothing(Critic):
    async def save(self, directory):
        pass

    async def restore(self, directory):
        pass


class Undecided(Critic):
    def actor_may_update(self):
        return None


class LeavesTooMuch(Critic):
    async def expect(self, num_updates):
        return num_updates + 1


class ClosesOnce(Critic):
    closed = False

    async def close(self):
        if self.closed:
            raise RuntimeError("closed already")
        self.closed = True


class PlainUpdate(Critic):
    def update(self, minibatch):
        return {}


VALUES = "test_values_are_one_number_a_sampled_token"
CRITICS = [
    (Everywhere, VALUES),
    (NotFinite, VALUES),
    (NoValues, VALUES),
    (Peeks, "test_a_value_belongs_to_the_tokens_before_it"),
    (NoMetrics, "test_an_update_returns_metrics"),
    (Idle, "test_updates_bring_values_to_the_returns"),
    (SavesNothing, "test_it_writes_and_reads_its_own_directory"),
    (Undecided, "test_it_says_when_the_actor_may_update"),
    (LeavesTooMuch, "test_it_says_when_the_actor_may_update"),
    (ClosesOnce, "test_it_closes_twice_and_without_a_start"),
    (PlainUpdate, "test_it_is_what_its_slot_calls_for"),
]


def critic_suite(cls: type[Critic]) -> Any:
    def target(context: Any) -> Critic:
        return cls()

    return type("Tested", (CriticEngineSuite,), {"target": target, "estimates": True})


@pytest.mark.parametrize(("mutant", "check"), CRITICS)
def test_a_broken_critic_is_red(mutant: type[Critic], check: str) -> None:
    assert check in failures(critic_suite(mutant), [check])


def test_a_critic_that_is_as_it_should_be_is_green() -> None:
    assert failures(critic_suite(Critic)) == {}


SIZES = "test_each_pool_has_a_name_and_a_size"
CALLS: list[int] = []


def another_each_time(requests):
    CALLS.append(1)
    return [PoolSpec("judge", gpus_per_node=8 + len(CALLS))] if requests else []


POOLS = [
    (lambda requests: None, SIZES),
    (lambda requests: [], SIZES),
    (lambda requests: [PoolSpec("judge"), PoolSpec("judge")], SIZES),
    (lambda requests: [PoolSpec("other")], "test_each_pool_is_used_by_a_role"),
    (lambda requests: [PoolSpec("judge")], "test_without_its_roles_there_are_no_pools"),
    (lambda requests: [PoolSpec("judge", gpus_per_node=1)], "test_a_pool_is_as_large_as_its_roles_need"),
    (lambda requests: [PoolSpec("judge", colocates=("none",))], "test_a_union_is_of_pools_that_there_are"),
    (another_each_time, "test_it_declares_the_same_whenever_it_is_asked"),
]


@pytest.mark.parametrize(("mutant", "check"), POOLS)
def test_a_broken_pool_is_red(mutant: Any, check: str) -> None:
    requests = (WorkerRequest(Role("judge", RewardReplica), "hf", "judge", gpus=2.0),)
    tested = type("Tested", (ResourcePoolSuite,), {"target": staticmethod(mutant), "requests": requests})
    assert check in failures(tested, [check])


@pytest.mark.parametrize(
    ("suite", "rows"), [(AgentLoopSuite, AGENTS), (CriticEngineSuite, CRITICS), (ResourcePoolSuite, POOLS)]
)
def test_every_check_has_a_mutant(suite: Any, rows: Any) -> None:
    assert set(all_checks(suite)) - LIFE == {check for _, check in rows} - LIFE
