"""Settings that an error advises for a model that exceeds its devices: which of those that fit, and how many plans it
takes to find them."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from gpu_machines import GIB, planned
from refused_plans import LENGTHS, MANY, VLLM, Planning, facts_on

from rlcore.errors import PlanError
from rlcore.plan import Facts, RunPlan, fitting
from rlcore.plan.fitting import ALIKE, MAX_PLANS, with_settings_that_fit
from rlcore.plan.machine_cards import CARDS, facts_of, machine_like, machine_of
from rlcore.plan.machine_plan import Lengths, step_layout, step_size
from rlcore.plan.memory_limits import DeviceMemoryError


@pytest.mark.parametrize(
    ("on", "overrides"),
    [("8xRTX4090", (*MANY, *VLLM)), ("4xA10", (*MANY, *VLLM)), ("8xL4", (*MANY, "rollout.backend=hf"))],
)
def test_of_all_settings_that_fit_the_fastest_are_advised(on: str, overrides: tuple[str, ...]) -> None:
    planning = Planning(facts_on(on), *overrides)
    advised, plans, fit = planning.advised(), planning.plans, planning.all_that_fit()
    assert len(fit) > 1
    assert fit[advised] <= (1 + ALIKE) * min(fit.values())
    assert fit[advised] < 0.8 * next(iter(fit.values())), "the first that fits is slower"
    alike = [settings for settings in fit if fit[settings] <= (1 + ALIKE) * min(fit.values())]
    assert len(advised) == min(map(len, alike)), "of those that are about as fast the fewest settings"
    assert plans <= 2 * planning.num_ways() // 3, "a layout that cannot be the fastest is not planned"


def test_of_layouts_that_take_about_as_long_the_one_with_the_fewest_settings_is_advised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planning = Planning(facts_on("8xRTX4090"), *MANY, *VLLM)
    fit = planning.all_that_fit()
    fewest = min(
        (settings for settings in fit if settings != planning.advised()), key=lambda found: (len(found), fit[found])
    )
    fastest = planning.advised()
    assert len(fewest) < len(fastest)
    monkeypatch.setattr(fitting, "ALIKE", fit[fewest] / min(fit.values()) - 0.99)
    assert planning.advised() == fewest


def test_the_estimate_of_a_plan_counts_launches_and_prompts_as_its_settings_say() -> None:
    facts = facts_on("2xH100")
    for eager in (False, True):
        plan = planned(*VLLM, f"plugins.vllm.enforce_eager={eager}", facts=facts)
        assert step_layout(plan, LENGTHS).graphs is not eager
    for way in ("tree", "none"):
        plan = planned(*VLLM, f"actor.shared_prefix={way}", facts=facts)
        assert step_size(plan, LENGTHS).shares_prompts is (way != "none")


def test_the_error_says_the_seconds_of_a_card_that_is_known_and_takes_another_for_a_similar_one() -> None:
    known = Planning(facts_on("8xA10"), *MANY, *VLLM)
    other = Planning(replace(known.facts, card=""), *MANY, *VLLM)
    assert known.advised() == other.advised()
    for lengths in (LENGTHS, Lengths(prompt=100, response=200)):
        seconds = known.seconds(known.advised(lengths), lengths)
        assert known.line(lengths).endswith(f"; with these shards a step takes about {seconds:,.0f} s")
    assert other.line().endswith("or take a smaller model")


@pytest.mark.parametrize(
    ("gib", "card"), [(23.5, "A10-24GB"), (47, "L40S-48GB"), (79, "A100-80GB"), (139, "H200-141GB")]
)
def test_a_card_is_taken_for_one_of_about_the_same_memory(gib: float, card: str) -> None:
    facts = Facts(gpus=16, gpus_per_node=8, gpu_memory_bytes=int(gib * GIB))
    assert str(machine_like(facts)) == f"2x8x{card}"
    assert str(machine_like(replace(facts, gpus_per_node=0, card="H20-96GB"))) == "16xH20-96GB"
    assert all(machine_like(facts_of(machine_of(f"2x4x{name}"))) == machine_of(f"2x4x{name}") for name in CARDS)


def test_without_an_architecture_the_settings_that_use_the_most_devices_are_advised() -> None:
    planning = Planning(replace(facts_on("8xRTX4090"), shape=None), *MANY, "rollout.backend=hf")
    assert planning.advised() == ("actor.data_parallel=8", "actor.sharding=fsdp2")
    planning.replan(("actor.data_parallel=4", "actor.sharding=fsdp2"))  # fits too, and came first


def test_the_number_of_plans_is_bounded() -> None:
    planning, tried = Planning(facts_on("4x8xRTX4090"), *MANY), list[tuple[str, ...]]()

    def refuse(further: Sequence[str]) -> RunPlan:
        tried.append(tuple(further))
        raise PlanError("no")

    assert planning.num_ways() > MAX_PLANS
    error = DeviceMemoryError("found", "found or advised")
    found = with_settings_that_fit(error, refuse, planning.config, planning.is_set, planning.facts, LENGTHS)
    assert found is error
    assert len(tried) == len(set(tried)) == MAX_PLANS
