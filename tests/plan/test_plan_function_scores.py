"""Plans with an estimator of each function's scores: settings that work on the sum of the scores are refused."""

import re

import pytest

from rlcore.config.presets import PRESETS
from rlcore.errors import PlanError
from rlcore.plan import Facts, RunPlan, make_plan
from rlcore.plugins import configure
from rlcore.testing.null import SETTINGS

REFUSED = {
    "algo.overlong=penalty": "choose algo.overlong=mask, or a reward function of the length",
    "algo.kl.placement=reward": "choose algo.kl.placement=loss or advantage",
    "algo.dynamic_sampling=true": "choose algo.dynamic_sampling=false",
    "rollout.samples_per_prompt=1": "compares the samples of a group, so it needs at least 2",
}


def planned(*overrides: str) -> RunPlan:
    hooks, loaded = configure([], [*SETTINGS, *overrides], ["null"])
    return make_plan(loaded, hooks, Facts(cpus=2))


@pytest.mark.parametrize(("setting", "choice"), REFUSED.items(), ids=REFUSED)
def test_a_setting_of_the_sum_is_refused(setting: str, choice: str) -> None:
    with pytest.raises(PlanError, match=f"^{re.escape(setting)}: algo.advantage=gdpo of .*{re.escape(choice)}$"):
        planned("algo.preset=gdpo", setting, *(["reference.backend=null"] if "kl" in setting else []))


def test_the_preset_is_the_paper_s_without_a_reference() -> None:
    assert PRESETS["gdpo"]["advantage"] == "gdpo"
    plan = planned("algo.preset=gdpo", "algo.overlong=mask")
    assert plan.config.algo.kl.placement == "none"
    assert planned("algo.preset=gdpo", "algo.kl.placement=advantage", "reference.backend=null").schedule.passes == (
        "reference",
    )
