"""The settings of the plugin `null`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class NullSection:
    """Delays and faults for tests: the section `plugins.null`."""

    setup_s: float = 0.0
    """Seconds that setting up the actor takes."""
    update_s: float = 0.0
    """Seconds that an update takes."""
    token_s: float = 0.0
    """Seconds per token; all rows decode together."""
    logprobs_s: float = 0.0
    """Seconds per pass for log-probs, also for the reference's."""
    save_s: float = 0.0
    """Seconds that saving takes."""
    fail_at_update: int = 0
    """Number of the update that raises, from 1; 0: none."""
    fail_at_token: int = 0
    """Generation raises when rows have this number of tokens; 0: never."""
    nan_updates: tuple[int, ...] = ()
    """Numbers of the updates whose gradient is not finite, from 1."""
    forget_version: int = 0
    """The rollout misses this version and all later ones, and reports the version before it; 0: none."""
    die_at_token: int = 0
    """A replica that has decoded this number of tokens of a row kills its process, `num_deaths` times in a run; 0:
    none."""
    num_deaths: int = 1
    keep_weights: bool = False
    """Replicas report the version of each load, but sample with the initial weights."""
