"""Explains why a run does not learn, from its data, and names the key to change.

A run and its viewer use the same rules (`rlcore_view.watch`). A rule is a function of the steps so far and the
configuration; its findings are about the last step.
"""

from collections.abc import Callable, Sequence

from rlcore_view.history import Finding, History
from rlcore_view.reward_rules import dropped, equal_rewards, failed, too_old, truncated, unread, zero_advantages
from rlcore_view.update_rules import (
    clipped_gradient,
    clipped_loss,
    entropy,
    kl,
    length,
    no_gradient,
    ratio,
    rounded_away,
    sampler_differs,
    skipped_updates,
    stale_sampler,
)

Rule = Callable[[History], Finding | None]

REASONS: Sequence[Rule] = (failed, dropped, truncated, unread)
"""Reasons for rewards that are missing or that a response without an answer gets; the first match is reported."""
OTHERS: Sequence[Rule] = (
    too_old,
    zero_advantages,
    no_gradient,
    clipped_gradient,
    clipped_loss,
    skipped_updates,
    sampler_differs,
    stale_sampler,
    entropy,
    length,
    kl,
    ratio,
    rounded_away,
)


def findings_now(history: History) -> list[Finding]:
    """Findings that hold at the last step, most direct cause first."""
    reasons = (finding for rule in REASONS if (finding := rule(history)) is not None)
    reason, high = next(reasons, None), history.now.high
    explained = reason is not None and high is not None and high <= 0
    found = [reason, None if explained else equal_rewards(history), *(rule(history) for rule in OTHERS)]
    return [finding for finding in found if finding is not None]
