"""Plans whose policy loss is restricted to the tokens of highest entropy."""

import re
from collections.abc import Sequence

import pytest

from rlcore.errors import ConfigError, PlanError
from rlcore.plan import Facts, OldLogprobs, RunPlan, make_plan
from rlcore.plugins import configure
from rlcore.testing.null import SETTINGS

SHARE = "algo.top_entropy_quantile=0.2"
REFUSED = {
    "algo.policy_loss=gmpo": "choose another algo.policy_loss, or algo.top_entropy_quantile=1",
    "schedule.old_logprobs=behaviour": "choose schedule.old_logprobs=recompute, or algo.top_entropy_quantile=1",
}


def planned(*overrides: str, plugins: Sequence[str] = ()) -> RunPlan:
    hooks, loaded = configure([], [*SETTINGS, *overrides], ["null", *plugins])
    return make_plan(loaded, hooks, Facts(cpus=2))


def test_a_pass_computes_the_entropies_also_where_pi_old_needs_none() -> None:
    assert planned().schedule.old_logprobs is OldLogprobs.DETACHED
    assert planned("algo.top_entropy_quantile=1.0").schedule.passes == ()
    plan = planned(SHARE)
    assert plan.schedule.old_logprobs is OldLogprobs.PASS
    assert plan.schedule.passes == ("old log-probs",)


@pytest.mark.parametrize(("stream", "whole"), [("false", "a step"), ("true", "a mini-batch")])
def test_the_plan_names_the_tokens(stream: str, whole: str) -> None:
    def notes(*more: str) -> list[str]:
        found = planned(f"schedule.stream_minibatches={stream}", "actor.minibatch_prompts=2", *more).notes
        return [note for note in found if "top_entropy_quantile" in note]

    [note] = notes(SHARE)
    assert note.startswith(f"{SHARE}: the policy loss trains that share of the tokens of {whole}, those at which")
    assert notes() == []


@pytest.mark.parametrize(("setting", "choice"), REFUSED.items(), ids=REFUSED)
def test_what_leaves_no_token_out_is_refused(setting: str, choice: str) -> None:
    planned(setting)
    with pytest.raises(PlanError, match=f"^{re.escape(SHARE)}: .*{re.escape(choice)}$"):
        planned(SHARE, setting)


@pytest.mark.parametrize("share", ["0", "-0.1", "1.5", "nan"])
def test_a_share_that_is_none_is_refused(share: str) -> None:
    with pytest.raises(ConfigError, match=r"algo\.top_entropy_quantile"):
        planned(f"algo.top_entropy_quantile={share}")


def test_what_the_refusal_of_late_passes_advises_is_accepted() -> None:
    """Log-probs as sampled would leave out the entropies, so that is advice for other runs only."""
    drop = ("schedule.max_staleness=1", "schedule.on_stale=drop", "actor.minibatch_prompts=2")
    streamed = (*drop, "schedule.stream_minibatches=true")
    with pytest.raises(PlanError, match=r"choose on_stale=wait or stream_minibatches=false$"):
        planned(*streamed, SHARE)
    planned(*drop, SHARE, "schedule.stream_minibatches=false")
    planned(*streamed, SHARE, "schedule.on_stale=wait")
    with pytest.raises(PlanError, match=r"choose on_stale=wait, stream_minibatches=false or old_logprobs=behaviour$"):
        planned(*streamed)
    planned(*streamed, "schedule.old_logprobs=behaviour")


@pytest.mark.parametrize("old_logprobs", ["recompute", "behaviour"])
def test_the_refusal_of_late_values_does_not_advise_other_log_probs(old_logprobs: str) -> None:
    """A critic's values need the pass with any log-probs."""
    critic = ("algo.preset=ppo", "critic.engine=critic_engine", "plugins.critic_engine.backend='null'")
    drop = ("schedule.max_staleness=1", "schedule.on_stale=drop", "actor.minibatch_prompts=2")
    streamed = (*drop, "schedule.stream_minibatches=true", f"schedule.old_logprobs={old_logprobs}")
    with pytest.raises(PlanError, match=r"values need a pass .* choose on_stale=wait or stream_minibatches=false$"):
        planned(*critic, *streamed, plugins=("critic_engine",))
    planned(*critic, *drop, f"schedule.old_logprobs={old_logprobs}", plugins=("critic_engine",))
