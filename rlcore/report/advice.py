"""Names the bound of a run, and the setting to change."""

from collections.abc import Sequence

from rlcore.contracts.reward_manager import BOUND_BY, BOUND_FRAC
from rlcore.plan import SchedulePlan
from rlcore.types import Metrics

NOTICEABLE = 0.1
"""A share of the step's time that is worth a sentence."""


def advice(
    history: Sequence[Metrics], schedule: SchedulePlan, num_minibatches: int, may_stream: bool = True
) -> list[str]:
    """Sentences about the steps of `history`, without the first if there are others, because it includes the start.

    `may_stream`: the plan would accept schedule.stream_minibatches=true.
    """
    steps = list(history[1:] or history)
    if not steps:
        return []
    step_s = _mean(steps, "time/step_s")
    waited = _mean(steps, "time/reward_wait_s") / step_s if step_s > 0 else 0.0
    bounds = _bounds(steps)
    lines = [f"schedule: {schedule.name}; {_shares(steps, step_s)}"]
    if waited < NOTICEABLE:
        lines.append("rewards are hidden behind the work: compute bounds the run, and no other schedule would help")
    elif bounds:
        lines.append(
            f"the reward's calls wait for {' and '.join(bounds)}, which bounds the run: allow more there if the "
            "service behind it can handle it; no schedule makes up for it"
        )
    elif _mean(steps, "time/service_bound") >= BOUND_FRAC:
        lines.append(
            "the reward's concurrency bounds the run: calls queue for it; allow more of them at a time in the settings "
            "of your reward manager"
        )
    else:
        lines.append(f"the reward's latency bounds the run; {_less_exposed(schedule, num_minibatches, may_stream)}")
    overhead = _mean(steps, "time/overhead")
    if overhead > NOTICEABLE:
        lines.append(
            f"steps took {overhead:.0%} longer than their parts (time/overhead): the machine is shared, "
            "or the controller is the bound; see time/* and log.txt"
        )
    return lines


def _shares(steps: Sequence[Metrics], step_s: float) -> str:
    if step_s <= 0:
        return "steps took no time"
    named = {
        "sampling": "time/generate_s",
        "forward passes": "time/passes_s",
        "waiting for rewards": "time/reward_wait_s",
        "updates": "time/updates_s",
    }
    shares = {what: _mean(steps, name) / step_s for what, name in named.items()}
    return f"{step_s:.3g} s per step: " + ", ".join(f"{share:.0%} {what}" for what, share in shares.items())


def _less_exposed(schedule: SchedulePlan, num_minibatches: int, may_stream: bool) -> str:
    """The setting that would hide more of the time."""
    knobs = []
    may_stream = may_stream and not schedule.stream
    if may_stream and num_minibatches > 1:
        knobs.append("schedule.stream_minibatches=true updates on the groups that are ready, and stays on-policy")
    if may_stream and num_minibatches == 1:
        knobs.append("actor.minibatch_prompts with schedule.stream_minibatches=true updates on groups that are ready")
    more = schedule.max_staleness + 1
    knobs.append(f"schedule.max_staleness={more} samples further ahead, at the price of older samples")
    return "; ".join(knobs)


def _bounds(steps: Sequence[Metrics]) -> list[str]:
    """The settings that calls of the reward waited for most of the time, on average over the steps."""
    names = sorted({name for step in steps for name in step if name.startswith(BOUND_BY)})
    shares = {name: sum(step.get(name, 0.0) for step in steps) / len(steps) for name in names}
    return [name.removeprefix(BOUND_BY) for name, share in shares.items() if share >= BOUND_FRAC]


def _mean(steps: Sequence[Metrics], name: str) -> float:
    values = [step[name] for step in steps if name in step]
    return sum(values) / len(values) if values else 0.0
