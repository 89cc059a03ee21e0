"""Plans of on-policy distillation: the teacher is the reference, and what would learn nothing is refused."""

import re

import pytest

from rlcore.errors import RlcoreError
from rlcore.plan import Facts, RunPlan, make_plan
from rlcore.plugins import configure
from rlcore.testing.null import SETTINGS

TEACHER = ("algo.preset=distillation", "reference.backend=null", "reference.path=teacher")
REFUSED = {
    "no advantages and no term": (["algo.advantage=none"], "algo.advantage=none: its advantages are 0, so nothing is"),
    "no teacher": (TEACHER[:2], "reference.path=empty: the teacher is the policy's starting point"),
    "its own teacher": (
        [*TEACHER[:2], "model.path=student", "reference.path=student"],
        "reference.path=student: the teacher is the policy's starting point",
    ),
    "groups that teach are replaced": (
        [*TEACHER, "algo.advantage=grpo", "algo.dynamic_sampling=true"],
        "but algo.kl.placement=advantage teaches with them, too; choose algo.dynamic_sampling=false",
    ),
    "a truncated distribution": (
        [*TEACHER, "rollout.allow_truncation=true", "rollout.top_k=5"],
        "algo.kl.placement=advantage estimates the KL from the tokens that were drawn",
    ),
    "another estimator of the KL": (
        [*TEACHER, "algo.kl.estimator=k2"],
        "it is used only when algo.kl.placement in ('loss', 'reward')",
    ),
    "an estimator without rewards": (
        ["reward.functions=null"],
        "reward.functions: empty, so there is nothing to learn from",
    ),
}


def planned(*overrides: str) -> RunPlan:
    hooks, loaded = configure([], [*SETTINGS, *overrides], ["null"])
    return make_plan(loaded, hooks, Facts(cpus=2))


def test_the_preset_needs_a_teacher_and_no_groups() -> None:
    plan = planned(*TEACHER, "rollout.samples_per_prompt=1")
    assert plan.schedule.passes == ("reference",)
    assert plan.schedule.all_rows == "", "rows without an advantage are left out, as elsewhere"
    assert (plan.config.algo.kl.placement, plan.config.algo.kl.coef) == ("advantage", 1.0)
    assert not [note for note in plan.notes if note.startswith("no reward functions")]


def test_rewards_are_optional() -> None:
    plan = planned(*TEACHER, "reward.functions=null")
    assert plan.rewards == ()
    assert "no reward functions: every reward is 0, in evaluations, too" in plan.notes


def test_another_estimator_adds_rewards_to_it() -> None:
    """The start of the policy is then a reference as any other."""
    plan = planned("algo.advantage=grpo", "algo.kl.placement=advantage", "reference.backend=null")
    assert plan.schedule.passes == ("reference",)


def test_the_estimator_none_is_allowed_where_tokens_have_another_gradient() -> None:
    plan = planned("algo.advantage=none", "algo.kl.placement=loss", "reference.backend=null")
    assert plan.schedule.all_rows == "algo.kl.placement=loss gives each token a gradient"


@pytest.mark.parametrize(("overrides", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_teach_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(RlcoreError, match=re.escape(message)):
        planned(*overrides)
