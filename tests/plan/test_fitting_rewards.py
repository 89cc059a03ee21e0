"""Settings that an error advises for a reward model that exceeds its devices, and estimates of its seconds."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gpu_machines import planned
from planned_machines import QWEN_7B, QWEN_32B
from refused_plans import LENGTHS, LONG, VLLM, Planning, facts_on

from rlcore.contracts.model_files import num_parameters
from rlcore.plan.faster_layouts import LayoutSearch
from rlcore.plan.machine_cards import machine_of
from rlcore.plan.machine_plan import step_layout, step_size
from rlcore.plan.machine_times import (
    OtherModel,
    RankLayout,
    RewardPool,
    StepEstimate,
    StepLayout,
    StepSize,
    estimate_step,
)

ENGINES = (*VLLM, *LONG, "actor.data_parallel=2", "rollout.replicas=2")
ON = machine_of("8xH100-80GB")
POLICY = StepSize(8 * 10**9, 32, 4096, 4096, 1024, 64, 32, 160, 900, 3936, 14336, 128256)


def where(key: str) -> str:
    return f"plugins.reward_loop.{key}"


def ranks(number: int) -> tuple[str, ...]:
    return where(f"models.judge.data_parallel={number}"), where("models.judge.sharding=fsdp2")


@pytest.fixture(name="judge")
def _judge(tmp_path: Path) -> Callable[..., tuple[str, ...]]:
    """The settings of a reward model of this shape in bfloat16."""

    def settings(shape: dict[str, Any] = QWEN_32B, name: str = "judge", *more: str) -> tuple[str, ...]:
        head = {"architectures": ["Qwen2ForSequenceClassification"], "num_labels": 1}
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(shape | head))
        model = {"path": tmp_path / name, "tokenizer": "bytes", "dtype": "bfloat16"}
        return (
            *(where(f"models.{name}.{key}={value}") for key, value in model.items()),
            *(where(f"models.{name}.{setting}") for setting in more),
            where(f"rewards.liked_by_{name}.kind=model"),
            where(f"rewards.liked_by_{name}.served_by={name}"),
        )

    return settings


def test_a_reward_model_is_advised_the_ranks_that_are_fastest_and_not_the_first_that_fit(
    judge: Callable[..., tuple[str, ...]],
) -> None:
    planning = Planning(facts_on("8xL40S"), *ENGINES, *judge())
    fit = planning.all_that_fit()
    assert list(fit) == [ranks(2), ranks(3), ranks(4)]
    assert planning.advised() == ranks(4)
    assert fit[ranks(4)] == min(fit.values()) < 0.8 * fit[ranks(2)], "the first that fits is slower"
    assert planning.line().endswith(f"; with these shards a step takes about {fit[ranks(4)]:,.0f} s")


def test_a_reward_model_whose_scores_sampling_hides_is_advised_the_fewest_ranks(
    judge: Callable[..., tuple[str, ...]],
) -> None:
    planning = Planning(facts_on("8xL40S"), *LONG, "rollout.backend=hf", "actor.offload=true", *judge())
    fit = planning.all_that_fit()
    assert planning.advised() == ranks(2)
    assert fit[ranks(2)] == fit[ranks(7)] < fit[ranks(8)], "eight share the device that samples"


def test_a_reward_model_that_fits_only_on_many_ranks_is_advised_them(judge: Callable[..., tuple[str, ...]]) -> None:
    large = judge(QWEN_32B | {"num_hidden_layers": 400}, "judge")
    planning = Planning(facts_on("8x8xL4-24GB"), *LONG, "rollout.backend=hf", "actor.lora.enabled=true", *large)
    found = re.search(r"judge\.data_parallel=(\d+) ", planning.line())
    assert found
    assert 25 < int(found[1]) <= 64


def test_without_an_architecture_a_reward_model_is_advised_the_ranks_that_use_the_most_devices(
    judge: Callable[..., tuple[str, ...]],
) -> None:
    facts = replace(facts_on("4xL40S"), shape=None)
    assert Planning(facts, *LONG, "rollout.backend=hf", *judge()).advised() == ranks(3)


def layout_of(on: str, *overrides: str) -> tuple[StepSize, StepLayout]:
    plan = planned(*overrides, facts=facts_on(on))
    return step_size(plan, LENGTHS), step_layout(plan, LENGTHS)


def test_the_estimate_of_a_plan_has_the_devices_of_its_reward_models(
    judge: Callable[..., tuple[str, ...]], tmp_path: Path
) -> None:
    replicas = ("replicas=2", "data_parallel=2", "context_parallel=2", "sharding=fsdp2")
    size, layout = layout_of("8xH100-80GB", *ENGINES, *judge(QWEN_7B, "judge", *replicas))
    [pool] = layout.rewards
    [model] = pool.models
    assert (pool.samples, pool.trains) == (False, False)
    assert model.ranks.devices == 4
    assert model.size.parameters == num_parameters(tmp_path / "judge") != size.parameters
    assert (model.size.layers, model.size.vocabulary, model.size.shares_prompts) == (28, 1, False)
    plain = layout_of("8xH100-80GB", *ENGINES)[1]
    assert plain == replace(layout, rewards=())


@pytest.mark.parametrize(
    ("more", "samples", "trains"),
    [
        (("rollout.backend=hf",), True, True),
        ((*VLLM, "cluster.pools.rollout.gpus_per_node=1"), False, True),
        ((*VLLM, "plugins.vllm.gpu_memory_frac=0.7", "rollout.pool=reward"), True, False),
    ],
)
def test_the_estimate_of_a_plan_knows_whose_devices_its_reward_models_share(
    judge: Callable[..., tuple[str, ...]], more: tuple[str, ...], samples: bool, trains: bool
) -> None:
    pool = "reward" if "rollout.pool=reward" in more else "main"
    models = (*judge(QWEN_7B, "judge", f"pool={pool}"), *judge(QWEN_7B, "critic", f"pool={pool}"))
    _, layout = layout_of("2xB200-180GB", *LONG, *more, *models, "actor.data_parallel=1", "rollout.replicas=1")
    assert [(len(pool.models), pool.samples, pool.trains) for pool in layout.rewards] == [(2, samples, trains)]


def test_a_reward_model_that_has_no_devices_or_no_known_architecture_takes_no_time(
    judge: Callable[..., tuple[str, ...]], tmp_path: Path
) -> None:
    settings = judge(QWEN_7B)
    assert not layout_of("8xH100-80GB", *ENGINES, *settings, where("models.judge.gpus=0"))[1].rewards
    (tmp_path / "judge" / "config.json").unlink()
    assert not layout_of("8xH100-80GB", *ENGINES, *settings)[1].rewards


def estimated(*pools: RewardPool, engines: int = 8, overlaps: bool = False) -> StepEstimate:
    return estimate_step(POLICY, StepLayout(8, engines, scoring_passes=1, overlaps=overlaps, rewards=pools), ON)


def reward_model(times: float, devices: int = 1) -> OtherModel:
    """A model that scores a step in so many times the seconds that the policy's pass takes on eight devices."""
    return OtherModel(replace(POLICY, groups=int(POLICY.groups * times * devices)), RankLayout(8 * devices))


def test_rewards_take_the_time_that_phases_on_other_devices_do_not_hide() -> None:
    plain = estimated()
    sample_s, score_s = plain.seconds["sample"], plain.seconds["score"]
    assert plain.seconds["reward"] == 0.0
    assert plain.bound["reward"] == "-"
    times = 2 + int(sample_s / score_s)
    needs_s = times * score_s
    for devices in (1, 2):
        model = reward_model(times, devices)
        apart, samples, trains, both = (
            estimated(RewardPool((model,), samples, trains))
            for samples, trains in ((False, False), (True, False), (False, True), (True, True))
        )
        assert apart.seconds["reward"] == pytest.approx(needs_s - sample_s - score_s)
        assert samples.seconds["reward"] == pytest.approx(needs_s - score_s)
        assert trains.seconds["reward"] == pytest.approx(needs_s - sample_s)
        assert both.seconds["reward"] == pytest.approx(needs_s)
        assert both.bound["reward"] == "operations"
        assert apart.total == pytest.approx(plain.total + apart.seconds["reward"])
    assert estimated(RewardPool((reward_model(0.5),))).total == plain.total
    one, other = (RewardPool((reward_model(number * times),)) for number in (1, 2))
    assert estimated(one, other).seconds["reward"] == estimated(other).seconds["reward"], "pools work at the same time"
    shared = estimated(RewardPool((*one.models, *other.models)))
    assert shared.seconds["reward"] == pytest.approx(3 * needs_s - sample_s - score_s), "models of a pool in turn"


@pytest.mark.parametrize(("engines", "sampling_is_longer"), [(8, False), (1, True)])
def test_a_schedule_that_overlaps_hides_rewards_behind_the_longer_side(engines: int, sampling_is_longer: bool) -> None:
    plain = estimated(engines=engines, overlaps=True)
    score_s = plain.seconds["score"]
    assert (plain.total == plain.seconds["sample"]) is sampling_is_longer
    times = 1 + int(plain.total / score_s)
    needs_s = times * score_s
    hidden, longer = (RewardPool((reward_model(number),)) for number in (times - 1, times))
    assert estimated(hidden, engines=engines, overlaps=True).total == plain.total
    assert estimated(longer, engines=engines, overlaps=True).total == pytest.approx(needs_s)
    contended = estimated(replace(longer, samples=True), engines=engines, overlaps=True).total
    assert contended == pytest.approx(needs_s + plain.seconds["sample"])
    training = sum(plain.seconds.values()) - plain.seconds["sample"]
    contended = estimated(replace(longer, trains=True), engines=engines, overlaps=True).total
    assert contended == pytest.approx(needs_s + training)


def test_the_least_time_of_another_layout_has_reward_models_with_the_same_ranks(
    judge: Callable[..., tuple[str, ...]],
) -> None:
    """Faster sampling hides less of their scores, so both together take as long in every layout."""
    plan, machine = planned(*ENGINES, *judge(), *ranks(2), facts=facts_on("8xL40S")), machine_of("8xL40S")
    size, layout = step_size(plan, LENGTHS), step_layout(plan, LENGTHS)
    found = estimate_step(size, layout, machine)
    assert found.seconds["reward"] > 0
    least = found.seconds["sample"] + found.seconds["reward"]
    search = LayoutSearch(plan, size, layout, machine)
    others = search.faster(found.total)
    assert others
    assert min(other.least_s for other in others) > least
    unknown = LayoutSearch(plan, size, replace(layout, rewards=()), machine)
    assert min(other.least_s for other in unknown.faster(found.total)) < least
