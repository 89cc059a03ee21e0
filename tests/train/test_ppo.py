"""PPO's numbers: from rewards, a KL penalty, token rewards and values to advantages and the critic's targets.

Everything is compared with loops over single tokens, and with cases computed by hand. Letters as in `rlcore.types`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from rlcore.algo.advantage import gae, whitened
from rlcore.algo.kl import AdaptiveKl, FixedKl
from rlcore.algo.step import weigh, with_advantages
from rlcore.config import AlgoConfig, KlConfig
from rlcore.errors import ConfigError, PlanError
from rlcore.plugins.planning import plan_run
from rlcore.testing.tiny import random_batch
from rlcore.types import Batch, TokenArrays

IN_REWARD = KlConfig(placement="reward", estimator="k1", coef=0.5)


@dataclass(frozen=True)
class Token:
    """A token of a row: one that the policy sampled, unless `sampled` is False."""

    logprob: float = 0.0
    reference: float = 0.0
    value: float = 0.0
    score: float = 0.0
    sampled: bool = True


def batch_of(rows: Sequence[Sequence[Token]], rewards: Sequence[float], samples: Sequence[int]) -> Batch:
    """A batch with these rows, each after one prompt token; `samples` says which sample a row is a part of."""
    lengths = [len(row) + 1 for row in rows]
    shape = (len(rows), max(lengths))

    def array(name: str) -> Any:
        values_BT = np.zeros(shape, dtype=np.float32)
        for b, row in enumerate(rows):
            values_BT[b, 1 : lengths[b]] = [getattr(token, name) for token in row]
        return values_BT

    mask_BT = array("sampled") > 0
    valid_BT = np.arange(shape[1])[None] < np.array(lengths)[:, None]
    tokens = TokenArrays(np.zeros(shape, dtype=np.int32), valid_BT, mask_BT, array("logprob"))
    return replace(
        random_batch(num_groups=1, samples=len(rows)),
        tokens=tokens,
        sample_B=np.array(samples, dtype=np.int64),
        group_B=np.zeros(len(rows), dtype=np.int64),
        lengths_B=np.array(lengths, dtype=np.int64),
        num_sampled_B=mask_BT.sum(1).astype(np.int64),
        rewards_B=np.array(rewards, dtype=np.float32),
        advantages_B=None,
        weights_B=None,
        token_scores_BT=array("score"),
        values_BT=array("value"),
        reference_logprobs_BT=array("reference"),
    )


def plain_ppo(
    rows: Sequence[Sequence[Token]], rewards: Sequence[float], samples: Sequence[int], algo: AlgoConfig, coef: float
) -> tuple[dict[tuple[int, int], float], dict[tuple[int, int], float]]:
    """Advantages and returns by (row, position), with one loop over a sample's sampled tokens."""
    advantages: dict[tuple[int, int], float] = {}
    returns: dict[tuple[int, int], float] = {}
    for sample in sorted(set(samples)):
        steps = [
            (b, t + 1, token)
            for b, row in enumerate(rows)
            if samples[b] == sample
            for t, token in enumerate(row)
            if token.sampled
        ]
        advantage = value_after = 0.0
        for number, (b, t, token) in reversed(list(enumerate(steps))):
            reward = token.score - coef * (token.logprob - token.reference)
            reward += rewards[b] if number == len(steps) - 1 else 0.0
            advantage = reward + algo.gamma * value_after - token.value + algo.gamma * algo.lam * advantage
            value_after = token.value
            advantages[b, t], returns[b, t] = advantage, advantage + token.value
    return advantages, returns


def arrays_of(batch: Batch, algo: AlgoConfig, kl: FixedKl) -> tuple[Any, Any, dict[str, float]]:
    made, metrics = with_advantages(batch, gae, True, algo, 64, kl)
    assert made.advantages_BT is not None
    assert made.returns_BT is not None
    return made.advantages_BT, made.returns_BT, metrics


def test_a_row_by_hand_with_a_tools_answer_a_token_reward_and_a_kl_penalty() -> None:
    row = [
        Token(logprob=-1.0, reference=-2.0, value=0.5),  # kl 1: reward -0.5
        Token(value=99.0, score=0.0, logprob=-5.0, sampled=False),  # a tool's answer
        Token(logprob=-1.0, reference=-1.0, value=0.2, score=0.1),  # kl 0: reward 0.1
        Token(logprob=-3.0, reference=-1.0, value=0.4),  # kl -2: reward 1 + 1 = 2
    ]
    algo = AlgoConfig(gamma=0.5, lam=0.5, kl=IN_REWARD)
    advantages_BT, returns_BT, metrics = arrays_of(batch_of([row], [1.0], [0]), algo, FixedKl(0.5))
    last = 2.0 - 0.4  # 1.6
    middle = (0.1 + 0.5 * 0.4 - 0.2) + 0.25 * last  # 0.1 + 0.4 = 0.5
    first = (-0.5 + 0.5 * 0.2 - 0.5) + 0.25 * middle  # -0.9 + 0.125 = -0.775
    assert advantages_BT[0] == pytest.approx([0.0, first, 0.0, middle, last], abs=1e-6)
    assert returns_BT[0] == pytest.approx([0.0, first + 0.5, 0.0, middle + 0.2, last + 0.4], abs=1e-6)
    assert metrics["policy/kl_per_sample"] == pytest.approx(-1.0)


@pytest.mark.parametrize("seed", range(3))
def test_advantages_and_returns_are_those_of_a_loop_over_tokens(seed: int) -> None:
    rng = np.random.default_rng(seed)

    def token() -> Token:
        logprob, reference, value, score = (float(np.float32(number)) for number in rng.standard_normal(4))
        sampled = bool(rng.random() < 0.7)
        return Token(logprob, reference, value, score if sampled else 0.0, sampled)

    rows = [[token() for _ in range(int(rng.integers(1, 9)))] for _ in range(6)]
    samples, rewards = [0, 0, 1, 2, 2, 3], [1.5, 1.5, -0.5, 2.0, 2.0, 0.25]  # samples 0 and 2 have two parts
    algo = AlgoConfig(gamma=0.97, lam=0.9, kl=IN_REWARD)
    advantages_BT, returns_BT, _ = arrays_of(batch_of(rows, rewards, samples), algo, FixedKl(0.3))
    advantages, returns = plain_ppo(rows, rewards, samples, algo, coef=0.3)
    for found_BT, expected in ((advantages_BT, advantages), (returns_BT, returns)):
        wanted_BT = np.zeros(found_BT.shape)
        for place, value in expected.items():
            wanted_BT[place] = value
        assert found_BT == pytest.approx(wanted_BT, rel=1e-6, abs=1e-6)


def test_the_kl_in_the_reward_is_of_pi_old_where_the_batch_has_it_and_else_of_the_sampler() -> None:
    row = [Token(logprob=-1.0, reference=-3.0, value=0.0)]
    batch, algo = batch_of([row], [0.0], [0]), AlgoConfig(gamma=1.0, lam=1.0, kl=IN_REWARD)
    advantages_BT, _, metrics = arrays_of(batch, algo, FixedKl(0.5))
    assert (advantages_BT[0, 1], metrics["policy/kl"]) == (pytest.approx(-0.5 * 2.0), pytest.approx(2.0))
    old_BT = np.array([[0.0, -1.5]], dtype=np.float32)  # weights have moved since the token was sampled
    advantages_BT, _, metrics = arrays_of(replace(batch, old_logprobs_BT=old_BT), algo, FixedKl(0.5))
    assert (advantages_BT[0, 1], metrics["policy/kl"]) == (pytest.approx(-0.5 * 1.5), pytest.approx(1.5))


def test_the_adaptive_coefficient_of_a_step_is_what_the_step_before_left() -> None:
    row = [Token(logprob=-1.0, reference=-5.0, value=0.0)]  # kl 4 per sample, twice the target: clamped to 0.2
    controller = AdaptiveKl(0.5, target=2.0, horizon=10)
    algo = AlgoConfig(gamma=1.0, lam=1.0, kl=replace(IN_REWARD, controller="adaptive"))
    first, streamed = (arrays_of(batch_of([row], [0.0], [0]), algo, controller) for _ in range(2))
    controller.end_step()
    second = arrays_of(batch_of([row], [0.0], [0]), algo, controller)
    assert first[0][0, 1] == streamed[0][0, 1] == pytest.approx(-0.5 * 4.0)
    assert second[0][0, 1] == pytest.approx(-0.5 * (1.0 + 0.2 * 2 / 10) * 4.0)
    assert [found[2]["policy/kl_coef"] for found in (first, streamed, second)] == [0.5, 0.5, pytest.approx(0.52)]


def test_whitened_advantages_have_mean_0_and_deviation_1_over_sampled_tokens_and_leave_the_targets_alone() -> None:
    rng = np.random.default_rng(0)
    rows = [[Token(value=float(rng.random()), sampled=bool(rng.random() < 0.6)) for _ in range(7)] for _ in range(4)]
    batch = batch_of(rows, [1.0, 0.0, 0.0, 2.0], [0, 1, 2, 3])
    plain_BT, returns_BT, _ = arrays_of(batch, AlgoConfig(lam=0.9), FixedKl(0.0))
    white_BT, same_BT, _ = arrays_of(batch, AlgoConfig(lam=0.9, whiten_advantages=True), FixedKl(0.0))
    assert np.array_equal(returns_BT, same_BT)
    places = [(b, t + 1) for b, row in enumerate(rows) for t, token in enumerate(row) if token.sampled]
    chosen = [float(plain_BT[place]) for place in places]
    mean = sum(chosen) / len(chosen)
    deviation = math.sqrt(sum((row - mean) ** 2 for row in chosen) / len(chosen))
    for place, value in zip(places, chosen, strict=True):
        assert white_BT[place] == pytest.approx((value - mean) / (deviation + 1e-6), abs=1e-6)
    assert np.count_nonzero(white_BT) <= len(places)


@pytest.mark.parametrize("values", [[0.25, 0.25, 0.25], [7.0]])
def test_equal_advantages_are_whitened_to_exactly_0(values: list[float]) -> None:
    advantages_BT, mask_BT = torch.tensor([[9.0, *values]]), torch.tensor([[False, *[True] * len(values)]])
    assert not whitened(advantages_BT, mask_BT).any()
    assert not whitened(advantages_BT, torch.zeros_like(mask_BT)).any()


def test_a_sample_without_sampled_tokens_has_no_advantage_and_no_weight() -> None:
    rows = [[Token(sampled=False, value=3.0)], [Token(value=0.5), Token(value=0.25)]]
    batch = batch_of(rows, [5.0, 1.0], [0, 1])
    advantages_BT, returns_BT, _ = arrays_of(batch, AlgoConfig(gamma=1.0, lam=1.0), FixedKl(0.0))
    assert advantages_BT == pytest.approx(np.array([[0, 0, 0], [0, 0.5, 0.75]]))
    assert returns_BT == pytest.approx(np.array([[0, 0, 0], [0, 1.0, 1.0]]))
    assert weigh(batch, AlgoConfig()).weights_B == pytest.approx([0.0, 0.5])


NEEDED = (
    "model.path=m",
    "model.tokenizer=bytes",
    "data.sources.all.path=p.jsonl",
    "reward.functions.letters.fn=count_letter",
)


def refused(error: type[Exception], *overrides: str, plugins: Sequence[str] = ()) -> str:
    with pytest.raises(error) as caught:
        plan_run([], [*NEEDED, *overrides], ["null", *plugins])
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_ppo_without_a_critic_says_what_to_type() -> None:
    message = refused(ConfigError, "algo.preset=ppo")
    assert "gae" in message
    assert message.endswith("enable it with `rlcore train ... --plugin critic_engine critic.engine=critic_engine`")


@pytest.mark.parametrize("preset", ["grpo", "dr_grpo", "rloo", "reinforce_pp"])
def test_a_critic_that_nothing_reads_is_refused(preset: str) -> None:
    message = refused(ConfigError, f"algo.preset={preset}", plugins=("critic_engine",))
    assert "critic.engine=critic_engine has no effect" in message
    assert "leave plugin 'critic_engine' (rlcore-critic-engine" in message
    assert "algo.advantage=gae" in message


@pytest.mark.parametrize("estimator", ["gpg", "reinforce_pp_baseline", "grpo", "opo"])
def test_an_estimator_that_compares_samples_of_a_prompt_needs_two(estimator: str) -> None:
    message = refused(PlanError, f"algo.advantage={estimator}", "rollout.samples_per_prompt=1")
    assert message.startswith(f"rollout.samples_per_prompt=1: algo.advantage={estimator} of ")
    assert "at least 2" in message


@pytest.mark.parametrize("preset", ["reinforce_pp", "remax", "ppo"])
@pytest.mark.parametrize("samples", [1, 2])
def test_dynamic_sampling_is_refused_where_equal_rewards_teach_too(preset: str, samples: int) -> None:
    plugins = ("critic_engine",) if preset == "ppo" else ()
    resampled = (f"rollout.samples_per_prompt={samples}", "algo.dynamic_sampling=true")
    message = refused(PlanError, f"algo.preset={preset}", *resampled, plugins=plugins)
    assert message.startswith(
        "algo.dynamic_sampling=true replaces groups whose rewards are all equal, but algo.advantage="
    )
    assert "choose algo.dynamic_sampling=false, or an estimator" in message


@pytest.mark.parametrize("settings", ["algo.preset=dapo", "algo.advantage=gpg", "algo.advantage=reinforce_pp_baseline"])
def test_dynamic_sampling_needs_two_samples_of_a_prompt(settings: str) -> None:
    resampled = ("algo.dynamic_sampling=true", "rollout.samples_per_prompt=1")
    assert refused(PlanError, settings, *resampled).startswith("rollout.samples_per_prompt=1: ")
    plan_run([], [*NEEDED, settings, resampled[0], "rollout.samples_per_prompt=2"], ["null"])


def test_ppo_can_be_streamed_whitened_or_not() -> None:
    stream = ("algo.preset=ppo", "schedule.stream_minibatches=true", "actor.minibatch_prompts=2")
    for whiten in ("true", "false"):
        override = f"algo.whiten_advantages={whiten}"
        plan = plan_run([], [*NEEDED, *stream, override], ["null", "critic_engine"])
        assert plan.schedule.stream
        assert plan.schedule.passes == ("values",)


@pytest.mark.parametrize(
    ("error", "override", "words"),
    [
        (ConfigError, "algo.lam=1.5", ("algo.lam", "at least 0 and at most 1")),
        (ConfigError, "algo.lam=-0.1", ("algo.lam", "at least 0 and at most 1")),
        (ConfigError, "algo.lam=.nan", ("algo.lam", "finite")),
        (ConfigError, "algo.gamma=1.01", ("algo.gamma", "at most 1")),
        (PlanError, "actor.minibatch_prompts=3", ("does not divide train.prompts_per_step=8", "1, 2, 4, 8")),
        (PlanError, "actor.minibatch_prompts=9", ("train.prompts_per_step=8", "needs 1 to 8")),
        (ConfigError, "rollout.samples_per_prompt=0", ("rollout.samples_per_prompt", "at least 1")),
        (ConfigError, "plugins.critic_engine.value_clip=-1", ("value_clip", "at least 0")),
        (ConfigError, "plugins.critic_engine.lr=.nan", ("plugins.critic_engine.lr", "finite")),
        (ConfigError, "plugins.critic_engine.trunk=actors", ("choose from", "actor, own")),
        (ConfigError, "plugins.critic_engine.lr_sched=linear", ("did you mean", "lr_schedule")),
        (ConfigError, "plugins.critic_engine.head=saved", ("plugins.critic_engine.path is empty",)),
    ],
)
def test_bad_settings_are_refused_before_anything_starts(
    error: type[Exception], override: str, words: tuple[str, ...]
) -> None:
    message = refused(error, "algo.preset=ppo", override, plugins=("critic_engine",))
    assert all(word in message for word in words), message


def test_settings_without_effect_on_the_actors_trunk_are_refused() -> None:
    trunk = ("algo.preset=ppo", "plugins.critic_engine.trunk=actor")
    for setting in ("dtype=bfloat16", "gradient_checkpointing=true"):
        assert "has no effect" in refused(
            ConfigError, *trunk, f"plugins.critic_engine.{setting}", plugins=("critic_engine",)
        )
    message = refused(ConfigError, "algo.whiten_advantages=true")
    assert "critic.engine" in message


def test_a_critic_inside_an_actor_of_another_backend_is_refused() -> None:
    message = refused(
        PlanError,
        "algo.preset=ppo",
        "plugins.critic_engine.trunk=actor",
        "actor.backend='null'",
        "rollout.backend='null'",
        plugins=("critic_engine",),
    )
    assert "actor" in message
    assert "backend" in message


def test_the_plan_of_a_critic_inside_the_actor_and_of_one_in_a_separate_pool() -> None:
    def planned(setting: str) -> Any:
        return plan_run([], [*NEEDED, "algo.preset=ppo", f"plugins.critic_engine.{setting}"], ["null", "critic_engine"])

    inside, own = planned("trunk=actor"), planned("own_pool=true")
    [critic] = [worker for worker in inside.workers if worker.request.role.name == "critic"]
    assert critic.request.embedded_in is not None
    assert [pool.name for pool in inside.pools] == ["main"]
    assert {pool.name: pool.roles for pool in own.pools}["critic"] == ("critic",)
    assert inside.config.algo.whiten_advantages
