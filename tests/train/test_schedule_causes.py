"""Claims of each schedule about the order of events, tested by delaying samples and rewards."""

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlcore.config import RunConfig, TrainConfig
from rlcore.report import metrics
from rlcore.testing.causes import NUM, PROMPTS, SAMPLES, Event, Events, Script, played
from rlcore.testing.tiny import random_batch, write_tiny_model
from rlcore.train.minibatches import epoch_minibatches, later_epoch, one_ahead
from rlcore.types import Batch, Reward

STREAM = {"schedule.stream_minibatches": "true"}
ONE_OFF = {"schedule.max_staleness": 1}
THREE_OFF = {"schedule.max_staleness": 3}
REPLICA = {"rollout.backend": "null_replica", "cluster.in_process": "true"}
"""The rollout has separate weights, so that it can sample during updates."""
PPO = {"algo.preset": "ppo", "critic.engine": "critic_engine", "plugins.critic_engine.backend": "'null'"}
REFERENCE = {"algo.kl.placement": "loss", "reference.backend": "'null'"}


def tiny(directory: Path) -> dict[str, Any]:
    """A tiny transformers model instead of the null one."""
    path = write_tiny_model(directory / "tiny")
    return {"model.path": str(path), "actor.backend": "hf", "rollout.backend": "hf", "cluster.threads": 1}


STREAMED: dict[str, tuple[dict[str, Any], ...]] = {
    "on-policy": (STREAM,),
    "one step off": (STREAM, ONE_OFF),
    "three steps off": (STREAM, THREE_OFF),
    "replicas": (STREAM, REPLICA),
    "ppo": (STREAM, PPO),
    "reference": (STREAM, REFERENCE),
}


async def last_group_after_the_others_are_trained(events: Events, event: Event) -> None:
    """The rewards of a pass's last prompt come when its step has been updated on all others."""
    if event.prompt == PROMPTS - 1:
        await events.until("updated", event.step, PROMPTS - 1)


@pytest.mark.parametrize("schedule", STREAMED)
def test_streamed_updates_are_made_before_the_last_groups_rewards_are_given(schedule: str, tmp_path: Path) -> None:
    script = Script(reward=last_group_after_the_others_are_trained)
    events = played(tmp_path, script, 3, *STREAMED[schedule])
    assert [events.count("updated", step) for step in (1, 2, 3)] == [PROMPTS] * 3


@pytest.mark.slow
@pytest.mark.parametrize("critic", [False, True], ids=["grpo", "ppo"])
def test_the_transformers_engine_updates_before_the_last_groups_rewards_are_given(critic: bool, tmp_path: Path) -> None:
    settings = (STREAM, tiny(tmp_path), PPO | {"plugins.critic_engine.backend": "hf"} if critic else {})
    events = played(tmp_path, Script(reward=last_group_after_the_others_are_trained), 2, *settings)
    assert events.count("updated") == 2 * PROMPTS


async def last_reward_when_nothing_else_happens(events: Events, event: Event) -> None:
    if (event.prompt, event.sample) == (PROMPTS - 1, SAMPLES - 1):
        await events.quiet()


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [{}, ONE_OFF, REPLICA], ids=["synchronous", "one step off", "replicas"])
def test_without_streaming_no_update_begins_before_every_reward_of_the_step_is_given(
    schedule: dict[str, Any], tmp_path: Path
) -> None:
    events = played(tmp_path, Script(reward=last_reward_when_nothing_else_happens), 2, schedule)
    for step in (1, 2):
        scored, updating = events.places("scored", step), events.places("updating", step)
        assert (len(scored), len(updating)) == (NUM, PROMPTS)
        assert max(scored) < min(updating)


@pytest.mark.parametrize("streamed", [{}, STREAM], ids=["whole", "streamed"])
@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_prompts_are_sampled_and_their_rewards_asked_for_as_many_steps_ahead_as_the_bound_says(
    staleness: int, streamed: dict[str, Any], tmp_path: Path
) -> None:
    async def hold(events: Events, event: Event) -> None:
        if event.step == 1:  # until the rewards of the last step that may be issued have been asked for
            await events.until("asked", 1 + staleness, NUM)

    events = played(tmp_path, Script(reward=hold), 2, {"schedule.max_staleness": staleness}, streamed, last_step=9)
    assert max(events.places("asked", 1 + staleness)) < min(events.places("updating", 1))
    issued = events.places("issued")
    assert sum(at < events.places("published", 1)[0] for at in issued) == 1 + staleness, "and not further"


@pytest.mark.parametrize("settings", [(), (STREAM,), (ONE_OFF,), (THREE_OFF, STREAM)], ids=str)
def test_no_prompt_is_issued_that_no_step_will_train_on(settings: tuple[dict[str, Any], ...], tmp_path: Path) -> None:
    events = played(tmp_path, Script(), 3, *settings)
    assert events.count("issued") == 3
    assert len(events.trainer.buffer) == 0


def test_no_prompt_is_issued_in_the_last_step_where_steps_take_what_is_ready_first(tmp_path: Path) -> None:
    events = played(tmp_path, Script(), 3, ONE_OFF, {"schedule.on_stale": "drop"})
    assert events.trainer.buffer.num_discarded + 3 * PROMPTS == events.trainer.buffer.num_retired
    assert events.count("sampled") == events.trainer.buffer.num_retired * SAMPLES


@pytest.mark.slow
@pytest.mark.parametrize("rollout", [{}, REPLICA], ids=["embedded", "replicas"])
def test_on_policy_no_update_begins_while_anything_of_the_step_is_sampled(
    rollout: dict[str, Any], tmp_path: Path
) -> None:
    async def hold(events: Events, event: Event) -> None:
        if events.count("sampled", event.step) == NUM - 1:
            await events.until("scored", event.step, NUM - 1)
            await events.quiet()

    events = played(tmp_path, Script(sample=hold), 2, STREAM, rollout)
    for step in (1, 2):
        assert max(events.places("sampled", step)) < min(events.places("updating", step))


@pytest.mark.slow
def test_one_step_off_the_embedded_sampler_finishes_before_the_weights_change(tmp_path: Path) -> None:
    async def hold(events: Events, event: Event) -> None:
        if events.count("sampled", event.step) == NUM - 1:
            await events.quiet()

    events = played(tmp_path, Script(sample=hold), 2, ONE_OFF, STREAM, last_step=9)
    assert max(events.places("sampled", 2)) < min(events.places("updating", 1))


@pytest.mark.parametrize(
    ("schedule", "what"),
    [(ONE_OFF | REPLICA, "updated"), (THREE_OFF, "published"), (THREE_OFF | REPLICA, "published")],
    ids=["one step off, replicas", "three steps off", "three steps off, replicas"],
)
def test_the_next_step_is_sampled_while_this_one_is_updated_and_further_off_also_while_it_is_published(
    schedule: dict[str, Any], what: str, tmp_path: Path
) -> None:
    async def hold(events: Events, event: Event) -> None:
        if event.step == 2 and events.count("sampled", 2) == NUM - 1:
            await events.until(what, 1)

    events = played(tmp_path, Script(sample=hold), 2, schedule, last_step=9)
    assert events.places(what, 1)[0] < max(events.places("sampled", 2))


@pytest.mark.parametrize("schedule", [ONE_OFF | REPLICA, THREE_OFF], ids=["replicas", "three steps off"])
def test_samplers_that_may_run_during_updates_take_the_next_pass_before_one_ends(
    schedule: dict[str, Any], tmp_path: Path
) -> None:
    async def hold(events: Events, event: Event) -> None:
        if event.step == 1:
            await events.until("sampled", 2)

    assert played(tmp_path, Script(sample=hold), 1, schedule, last_step=9).count("sampled", 1) == NUM


@pytest.mark.slow
def test_one_step_off_the_embedded_sampler_finishes_a_pass_before_it_begins_the_next(tmp_path: Path) -> None:
    async def hold(events: Events, event: Event) -> None:
        if event.step == 1:
            await events.quiet()

    events = played(tmp_path, Script(sample=hold), 1, ONE_OFF, last_step=9)
    assert max(events.places("sampled", 1)) < events.places("issued", 2)[0]


@pytest.mark.slow
def test_one_step_off_replicas_finish_what_they_sample_before_they_get_new_weights(tmp_path: Path) -> None:
    async def hold(events: Events, event: Event) -> None:
        if event.step == 2 and events.count("sampled", 2) == NUM - 1:
            await events.until("updated", 1, PROMPTS)
            await events.quiet()

    events = played(tmp_path, Script(sample=hold), 2, ONE_OFF, REPLICA, last_step=9)
    assert max(events.places("sampled", 2)) < events.places("published", 1)[0]


@pytest.mark.parametrize("schedule", [{}, STREAM, ONE_OFF], ids=["synchronous", "streamed", "one step off"])
def test_a_sample_goes_to_its_reward_before_the_next_one_is_finished(schedule: dict[str, Any], tmp_path: Path) -> None:
    async def hold(events: Events, event: Event) -> None:
        await events.until("asked", event.step, events.count("sampled", event.step))

    heldout = tmp_path / "heldout.jsonl"
    heldout.write_text('{"prompt": "held out", "answer": "1"}\n')
    settings = {"eval.sources.heldout.path": str(heldout), "eval.samples_per_prompt": 3, "eval.temperature": 1}
    events = played(tmp_path, Script(sample=hold, evaluate_after=1), 2, schedule, settings)
    assert events.count("asked", 0) == 3
    assert events.count("asked") >= 3 + 2 * NUM


@pytest.mark.parametrize("schedule", [{}, STREAM, ONE_OFF], ids=["synchronous", "streamed", "one step off"])
def test_forward_passes_that_need_no_reward_are_done_while_rewards_are_pending(
    schedule: dict[str, Any], tmp_path: Path
) -> None:
    async def hold(events: Events, event: Event) -> None:
        for what in ("reference done", "values done", *(["logprobs done"] if schedule == ONE_OFF else [])):
            await events.until(what, event.step)

    events = played(tmp_path, Script(reward=hold), 2, PPO, REFERENCE, schedule)
    for what in ("reference", "values"):
        assert [events.count(what, step) for step in (1, 2)] == [1, 1], "one pass of each model in a step"


@pytest.mark.parametrize(
    ("settings", "passes"),
    [
        ((), 0),
        ((STREAM,), 0),
        ((ONE_OFF,), 1),
        ((ONE_OFF, {"actor.minibatch_prompts": 0}), 0),
        ((ONE_OFF, {"schedule.old_logprobs": "behaviour"}), 0),
        ((REFERENCE,), 0),
        ((REFERENCE, ONE_OFF), 1),
        ((REPLICA,), 1),
        (({"actor.epochs": 2, "actor.minibatch_prompts": 0},), 0),
    ],
    ids=str,
)
def test_old_logprobs_take_a_pass_only_where_they_are_not_at_hand(settings: Any, passes: int, tmp_path: Path) -> None:
    events = played(tmp_path, Script(), 2, *settings)
    assert [events.count("logprobs", step) for step in (1, 2)] == [passes] * 2
    for step in (1, 2)[: 2 * passes]:
        assert events.places("logprobs done", step)[0] < min(events.places("updating", step))


def old_logprobs_by_token(minibatches: list[Batch]) -> dict[int, set[float]]:
    """pi_old's log-probs of each sampled token; the null policy has the same at every position."""
    found: dict[int, set[float]] = {}
    for minibatch in minibatches:
        assert minibatch.old_logprobs_BT is not None
        tokens, old_BT = minibatch.tokens, minibatch.old_logprobs_BT
        for token, logprob in zip(tokens.token_ids_BT[tokens.loss_mask_BT], old_BT[tokens.loss_mask_BT], strict=True):
            found.setdefault(int(token), set()).add(float(logprob))
    return found


FAST = {"actor.lr": 0.5, "rollout.max_tokens": 64}


@pytest.mark.parametrize("schedule", [{}, STREAM, ONE_OFF, ONE_OFF | STREAM], ids=str)
def test_every_update_of_a_step_is_compared_with_the_policy_at_its_start(
    schedule: dict[str, Any], tmp_path: Path
) -> None:
    minibatches = played(tmp_path, Script(), 2, FAST, schedule).minibatches[PROMPTS:]
    assert all(len(name) == 1 for name in old_logprobs_by_token(minibatches).values())
    recorded = [
        bool(np.array_equal(minibatch.old_logprobs_BT, minibatch.tokens.rollout_logprobs_BT))
        for minibatch in minibatches
        if minibatch.old_logprobs_BT is not None
    ]
    assert recorded == [schedule in ({}, STREAM)] * PROMPTS, "one step off another policy sampled"


def test_with_one_update_per_step_the_policy_is_compared_with_itself_and_behaviour_is_as_recorded(
    tmp_path: Path,
) -> None:
    single = {"actor.minibatch_prompts": 0}
    for minibatch in played(tmp_path / "a", Script(), 2, FAST, ONE_OFF, single).minibatches:
        assert minibatch.old_logprobs_BT is None
    for minibatch in played(
        tmp_path / "b", Script(), 2, FAST, ONE_OFF, {"schedule.old_logprobs": "behaviour"}
    ).minibatches:
        assert minibatch.old_logprobs_BT is not None
        assert np.array_equal(minibatch.old_logprobs_BT, minibatch.tokens.rollout_logprobs_BT)


def test_one_step_off_tokens_that_the_weights_at_the_start_of_the_step_sampled_are_known(tmp_path: Path) -> None:
    minibatches = played(tmp_path, Script(), 2, FAST, ONE_OFF).minibatches
    for number, minibatch in enumerate(minibatches):
        assert minibatch.same_weights_BT is not None
        mask_BT = minibatch.tokens.loss_mask_BT
        assert np.array_equal(minibatch.same_weights_BT, mask_BT & (number < PROMPTS))


def test_under_dynamic_sampling_equal_groups_fill_what_is_missing_with_advantage_0(tmp_path: Path) -> None:
    script = Script(score=lambda row: Reward(0.5))
    settings = {"algo.dynamic_sampling": "true", "algo.max_resample_rounds": 1}
    minibatches = played(tmp_path, script, 1, settings).minibatches
    assert sum(len(minibatch) for minibatch in minibatches) == NUM
    assert all(minibatch.advantages_B is not None and not minibatch.advantages_B.any() for minibatch in minibatches)


@pytest.mark.slow
def test_under_dynamic_sampling_forward_passes_are_made_of_what_is_trained_on_alone(tmp_path: Path) -> None:
    async def hold(events: Events, event: Event) -> None:
        await events.quiet()

    settings = {"algo.dynamic_sampling": "true"}
    events = played(tmp_path, Script(reward=hold), 1, REFERENCE, settings)
    assert max(events.places("scored", 1)) < min(events.places("reference", 1))


def test_where_late_prompts_are_dropped_a_step_trains_on_those_that_are_ready_and_the_late_one_is_discarded(
    tmp_path: Path,
) -> None:
    async def hold(events: Events, event: Event) -> None:
        if (event.step, event.prompt) == (1, 0):
            await events.until("published", 3)

    settings = {"schedule.on_stale": "drop"}
    events = played(tmp_path, Script(reward=hold), 4, ONE_OFF, settings)
    assert events.trainer.buffer.num_discarded == 1
    rows = [row for step in range(1, 5) for row in metrics.read_trajectories(tmp_path, step)]
    trained = {events.where[row["id"]["prompt"], row["id"]["epoch"]] for row in rows}
    assert len(trained) == 4 * PROMPTS
    assert (1, 0) not in trained


@pytest.mark.slow
def test_where_steps_wait_a_late_prompt_is_trained_on_in_its_own_step(tmp_path: Path) -> None:
    async def hold(events: Events, event: Event) -> None:
        if (event.step, event.prompt) == (1, 0):
            await events.until("scored", 2, NUM)
            await events.quiet()

    events = played(tmp_path, Script(reward=hold), 2, ONE_OFF)
    assert max(events.places("scored", 2)) < min(events.places("updating", 1))
    assert events.trainer.buffer.num_discarded == 0


def test_an_evaluation_ends_while_rewards_of_training_are_pending(tmp_path: Path) -> None:
    async def hold(events: Events, event: Event) -> None:
        if event.step == 2:
            await events.until("evaluated")

    heldout = tmp_path / "heldout.jsonl"
    heldout.write_text('{"prompt": "held out", "answer": "1"}\n')
    settings = {"eval.sources.heldout.path": str(heldout)}
    events = played(tmp_path, Script(reward=hold, evaluate_after=1), 2, ONE_OFF, settings)
    assert events.places("evaluated")[0] < min(events.places("scored", 2))


def test_the_order_of_minibatches_is_a_function_of_seed_step_and_epoch() -> None:
    batch = random_batch(num_groups=12)

    def order(seed: int, step: int, epoch: int) -> tuple[list[int], list[int]]:
        config = RunConfig(train=TrainConfig(seed=seed))
        config = replace(config, actor=replace(config.actor, minibatch_prompts=1))
        run: Any = SimpleNamespace(plan=SimpleNamespace(config=config), selection=None)
        parts = epoch_minibatches(run, batch, step, epoch)
        again = later_epoch([batch] * 3 + parts, seed, step, epoch)
        return [int(part.lengths_B.sum()) for part in parts], [len(order) for order in again]

    names = [(seed, step, epoch) for seed in (0, 1) for step in (0, 1) for epoch in (0, 1)]
    orders = [order(*name) for name in names]
    assert orders == [order(*name) for name in names]
    for which in (0, 1):
        assert len({tuple(order[which]) for order in orders}) == len(names), "none is that of another"
        assert len({tuple(sorted(order[which])) for order in orders}) == 1, "each has every mini-batch"


def test_the_next_minibatch_is_made_while_one_is_trained_on() -> None:
    async def used() -> list[str]:
        noted, made = list[str](), asyncio.Event()

        async def items() -> Any:
            for number in (1, 2):
                noted.append(f"made {number}")
                if number == 2:
                    made.set()
                yield random_batch(num_groups=number)

        async for batch in one_ahead(items()):
            await asyncio.wait_for(made.wait(), 5.0)
            noted.append(f"used {len(batch) // 2}")
        return noted

    assert asyncio.run(used()) == ["made 1", "made 2", "used 1", "used 2"]
