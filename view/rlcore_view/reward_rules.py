"""Rules about responses, rewards and advantages."""

from rlcore_view.history import STEADY, Finding, History
from rlcore_view.step_facts import StepFacts

HALF, NEARLY_ALL = 0.5, 0.9


def failed(history: History) -> Finding | None:
    now = history.now
    if not now.responses or now.failed / now.responses < HALF:
        return None
    what = f"{now.failed} of {now.responses} samples have no reward" + (f", such as: {now.error}" if now.error else "")
    return Finding(
        "rewards fail",
        what,
        "fix the cause that the error names; to try a reward function, call it on a few recorded completions",
    )


def dropped(history: History) -> Finding | None:
    now, dropped = history.now, history.now.metrics.get("reward/dropped_samples", 0.0)
    if not now.responses or dropped / now.responses < HALF:
        return None
    return Finding(
        "samples are dropped",
        f"{dropped:g} of {now.responses} samples were left out because a reward failed, {now.failed} of them their own",
        "fix the reward function, or set on_failure=drop_sample, which keeps the other samples of a group",
    )


def too_old(history: History) -> Finding | None:
    per_step = history.number("train.prompts_per_step", 0.0)
    if not per_step or len(history.recent) <= STEADY:
        return None
    before, now = (facts.metrics.get("data/given_up", 0.0) for facts in (history.recent[-1 - STEADY], history.now))
    if (now - before) / (STEADY * per_step) < HALF:
        return None
    return Finding(
        "prompts are discarded",
        f"{now - before:g} prompts were too old in the last {STEADY} steps, which trained on {STEADY * per_step:g}",
        f"raise {history.named('schedule.max_staleness')}, or wait for them with schedule.on_stale=wait",
    )


def cut_off(facts: StepFacts) -> bool:
    known = facts.cut + facts.ended
    return known > 0 and facts.cut / known >= NEARLY_ALL


def truncated(history: History) -> Finding | None:
    now = history.now
    if not cut_off(now):
        return None
    evidence = f"{now.cut} of {now.cut + now.ended} responses end at a token budget"
    if now.budget:
        evidence += f", the longest after {now.budget} tokens; {_with_more(now)}"
    advice = f"raise {history.named('rollout.max_tokens')}, or ask for shorter answers in the prompt"
    if 0 < now.budget < history.number("rollout.max_tokens", 0):
        advice = f"raise {history.named('rollout.max_tokens')} or what else ends a conversation (agent/ended/*)"
    if differ := now.groups - now.equal_groups:
        evidence += f"; rewards still differ in {differ} of {now.groups} groups"
        advice += ", if the reward needs the end of a response"
    elif now.groups:
        evidence += f"; no rewards differ within the {now.groups} groups, so nothing is learned"
    return Finding("responses are cut off", evidence, advice)


def _with_more(facts: StepFacts) -> str:
    """An estimate that assumes that responses keep ending at the rate of the budget's second half."""
    if not facts.late_ends or not facts.late_tokens:
        return "none ends in its second half, so nothing shows how many tokens would do"
    share = 1.0 - (1.0 - facts.late_ends / facts.late_tokens) ** facts.budget
    return f"at the rate at which they end in its second half, {share:.0%} of these would end within twice as many"


def unread(history: History) -> Finding | None:
    now = history.now
    if not now.readable or now.unread / now.readable < NEARLY_ALL:
        return None
    return Finding(
        "answers are not found",
        f"the reward found no answer in {now.unread} of {now.readable} responses",
        "show the wanted form in the prompt, or widen what the reward accepts",
    )


def equal_rewards(history: History) -> Finding | None:
    steps = int(history.number("algo.equal_rewards_warn_steps", 1))  # other trainers' files may have one step

    def equal(facts: StepFacts) -> bool:  # an estimator may teach without differences within groups
        return 0 < facts.groups == facts.equal_groups and not facts.taught

    if not history.steady(equal, steps):
        return None
    now = history.now
    evidence = f"nothing is learned: all rewards of every group were equal, in {now.groups} of {now.groups} groups"
    varying, value = ", ".join(now.varying), now.low
    if now.varying and value == now.high:
        constant = f"{evidence} {value:g}, though {varying} differ"
        return Finding("rewards cancel out", constant, "look at the components and their weights")
    if value is None or value != now.high:
        return Finding(
            "groups have equal rewards",
            f"{evidence}, with different values for different prompts",
            f"raise {history.named('rollout.samples_per_prompt')} or {history.named('rollout.temperature')}, or take "
            "prompts that are solved now and then",
        )
    evidence = f"{evidence} {value:g}"
    if value <= 0:
        advice = "the task is too hard for the model, or the reward cannot read its answers: look at the completions"
        return Finding("all rewards are equal", evidence, advice)
    if value == 1:
        return Finding("all rewards are equal", evidence, "the task is solved: take harder prompts")
    return Finding("all rewards are equal", evidence, "the reward does not tell responses apart: look at its code")


def zero_advantages(history: History) -> Finding | None:
    def zero(facts: StepFacts) -> bool:
        return facts.trained > 0 and not facts.taught and facts.equal_groups < facts.groups

    if not history.steady(zero):
        return None
    now = history.now
    return Finding(
        "advantages are zero",
        f"rewards differ in {now.groups - now.equal_groups} of {now.groups} groups, and each of {now.trained} "
        "advantages is 0",
        "look at algo.advantage, and at what algo.overlong and dropped samples leave of the groups",
    )
