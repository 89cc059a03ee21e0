"""Settings that an error advises for a critic or a reference that exceeds its devices, and estimates of their ranks."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from gpu_machines import planned as plan_of
from planned_machines import QWEN_7B, QWEN_32B, planned, refused, settings_of_7b
from refused_plans import LENGTHS, LONG, Planning, facts_on

from rlcore.plan import fitting
from rlcore.plan.fitting import ALIKE
from rlcore.plan.machine_cards import machine_of
from rlcore.plan.machine_plan import step_layout, step_size
from rlcore.plan.machine_times import OtherModel, RankLayout, StepEstimate, StepLayout, StepSize, estimate_step

BILLION = 10**9
POLICY = StepSize(8 * BILLION, 32, 4096, 4096, 1024, 64, 32, 160, 900, 3936, 14336, 128256)
CRITIC = replace(POLICY, parameters=2 * BILLION, layers=16, vocabulary=1)
ACTOR_FITS = ("algo.preset=ppo", "actor.lora.enabled=true", "rollout.backend=hf", *LONG)


def where(key: str) -> str:
    return f"plugins.critic_engine.{key}"


def test_a_critic_is_advised_the_ranks_that_are_fastest_and_not_the_first_that_fit() -> None:
    planning = Planning(facts_on("2x8xL4"), *ACTOR_FITS, where("own_pool=true"))
    advised, fit = planning.advised(), planning.all_that_fit()
    assert len(fit) > 5
    assert fit[advised] <= (1 + ALIKE) * min(fit.values())
    assert fit[advised] < 0.9 * next(iter(fit.values())), "the first that fits is slower"
    assert planning.line().endswith(f"; with these shards a step takes about {fit[advised]:,.0f} s")


def test_a_critic_is_advised_by_seconds_and_not_by_the_number_of_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A critic on more ranks is slower where the links between them are."""
    planning = Planning(facts_on("2x8xL4"), *ACTOR_FITS, where("own_pool=true"))
    estimate = fitting.estimate_step

    def slow_beyond_four(size: StepSize, layout: StepLayout, machine: object) -> StepEstimate:
        found = estimate(size, layout, machine)  # type: ignore[arg-type]
        many = layout.critic_model is not None and layout.critic_model.ranks.devices > 4
        return replace(found, seconds={name: (3 if many else 1) * s for name, s in found.seconds.items()})

    monkeypatch.setattr(fitting, "estimate_step", slow_beyond_four)
    assert planning.advised() == (where("data_parallel=4"), where("sharding=fsdp2"))


def test_in_a_pool_that_the_actor_does_not_share_a_critic_may_have_any_number_of_ranks() -> None:
    planning = Planning(facts_on("6xL4"), *ACTOR_FITS, where("own_pool=true"))
    assert planning.advised() == (where("data_parallel=5"), where("sharding=fsdp2")), "one is the actor's"


def test_actor_and_critic_that_both_exceed_a_device_are_advised_together() -> None:
    planning = Planning(facts_on("8xRTX4090"), "algo.preset=ppo", "plugins.critic_engine={}", "rollout.backend=hf")
    advised = planning.advised()
    assert {setting.partition("=")[0] for setting in advised} == {
        "actor.data_parallel",
        "actor.sharding",
        where("data_parallel"),
        where("sharding"),
    }
    assert planning.seconds(advised), "it is accepted"


@pytest.mark.slow
def test_a_reference_that_exceeds_a_device_is_advised_the_shards_that_are_the_actors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = settings_of_7b(tmp_path)
    (tmp_path / "reference").mkdir()
    (tmp_path / "reference" / "config.json").write_text(json.dumps(QWEN_32B))
    small = {"num_hidden_layers": 24, "hidden_size": 896, "intermediate_size": 4864}
    (tmp_path / "model" / "config.json").write_text(json.dumps(QWEN_7B | small))
    settings += ["algo.kl.placement=loss", f"reference.path={tmp_path / 'reference'}", "rollout.backend=hf"]
    line = refused(capsys, *settings, "--on", "8xL40S")
    found = re.search(r"role 'reference' needs about .*; shard it over devices \(([^)]*)\), or take a smaller", line)
    assert found, line
    assert "actor.sharding=fsdp2" in found[1]
    on = planned(capsys, *settings, *found[1].split(), "--on", "8xL40S")["on"]
    assert line.endswith(f"; with these shards a step takes about {on['step_s']:,.0f} s")
    same = [setting for setting in settings if not setting.startswith("reference.path")]
    alone = planned(capsys, *same, *found[1].split(), "--on", "8xL40S")["on"]
    assert on["phases"]["score"]["seconds"] > 10 * alone["phases"]["score"]["seconds"] > 0, "by its own size"
    assert on["phases"]["update"] == alone["phases"]["update"]
    assert "shards" not in refused(capsys, *settings, "--on", "1xL40S"), "nothing to share it with"


def _on_8xh100(layout: StepLayout) -> StepEstimate:
    return estimate_step(POLICY, layout, machine_of("8xH100-80GB"))


def _forward_s(size: StepSize) -> tuple[float, float]:
    """Seconds of one device for a forward pass: products at the peak, and values in memory."""
    tokens, rows = 64 * 160 + 64 * 32 * 900, 64 * 32
    products = 2 * size.parameters * tokens + 4 * size.layers * 4096 * rows * 900 * (160 + 900 / 2)
    values = 4 * 14336 + 8 * 4096 + 2 * (4096 + 1024)
    read = 2 * (2 * size.layers * values * tokens + 4 * size.vocabulary * rows * 900)
    return products / 989e12, read / (0.7 * 3350e9)


def test_a_critic_takes_the_seconds_of_its_model_on_its_ranks() -> None:
    alone = StepLayout(8, updates=2)
    ranks = RankLayout(4, sharded=True, copies=2, checkpointing=False, offload=True)
    both = _on_8xh100(replace(alone, critic=True, critic_model=OtherModel(CRITIC, ranks)))
    products_s, values_s = _forward_s(CRITIC)
    scored_s = (products_s / 0.5 + values_s) / 4
    assert both.seconds["score"] == pytest.approx(scored_s, rel=1e-9)
    # Two updates: 1e9 parameters per rank; half of 4 and 4 bytes are gathered and summed, and a copy sums its half.
    links_s = (0.5 * (4 + 4) * 2e9 + 0.5 * 8 * 1e9) / (0.7 * 450e9)
    optimizer_s, moved_s = 30e9 / (0.7 * 3350e9), (2 * 24 + 4) * 1e9 / 25e9
    update_s = 3 * (products_s / 0.4 + values_s) / 4 + 2 * (links_s + optimizer_s) + moved_s
    added_s = both.seconds["update"] - _on_8xh100(alone).seconds["update"]
    assert added_s == pytest.approx(update_s, rel=1e-9)


def test_a_critic_in_the_actors_processes_takes_as_long_as_the_policy() -> None:
    alone, both = (_on_8xh100(StepLayout(8, critic=critic)).seconds for critic in (False, True))
    assert both["update"] == pytest.approx(2 * alone["update"])
    assert both["score"] == pytest.approx(_on_8xh100(StepLayout(8, scoring_passes=1)).seconds["score"])


def test_a_reference_of_another_size_takes_the_seconds_of_its_model_on_the_actors_ranks() -> None:
    found = _on_8xh100(StepLayout(8, scoring_passes=1, reference=replace(CRITIC, vocabulary=128256)))
    one = _on_8xh100(StepLayout(8, scoring_passes=1))
    products_s, values_s = _forward_s(replace(CRITIC, vocabulary=128256))
    assert found.seconds["score"] - one.seconds["score"] == pytest.approx((products_s / 0.5 + values_s) / 8, rel=1e-9)


@pytest.mark.parametrize(
    ("settings", "ranks"),
    [
        ((where("gradient_checkpointing=true"),), RankLayout(1)),
        ((where("data_parallel=4"), where("gradient_checkpointing=true")), RankLayout(4)),
        (
            (
                where("data_parallel=4"),
                where("sharding=fsdp2"),
                where("dp_replicate=2"),
                where("offload=true"),
                where("gradient_checkpointing=false"),
            ),
            RankLayout(4, sharded=True, copies=2, checkpointing=False, offload=True),
        ),
        ((where("data_parallel=2"), where("gradient_checkpointing=false")), RankLayout(2, checkpointing=False)),
        ((where("trunk=actor"),), None),
    ],
)
def test_the_estimate_of_a_plan_has_the_ranks_of_its_critic(settings: Sequence[str], ranks: RankLayout | None) -> None:
    common = ("algo.preset=ppo", "plugins.critic_engine={}", "rollout.backend=hf")
    plan = plan_of(*common, *settings, facts=facts_on("4xB200-180GB"))
    layout = step_layout(plan, LENGTHS)
    assert layout.critic
    if ranks is None:
        assert layout.critic_model is None
    else:
        size = replace(step_size(plan, LENGTHS), vocabulary=1)
        assert layout.critic_model == OtherModel(size, ranks)
