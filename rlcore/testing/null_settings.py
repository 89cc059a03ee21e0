"""The settings of the plugin `null`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class NullSection:
    """Delays and faults, for tests; `plugins.null`."""

    setup_s: float = 0.0
    """Seconds that setting up the actor takes."""
    update_s: float = 0.0
    """Seconds that an update takes."""
    token_s: float = 0.0
    """Seconds per token; all rows are decoded together."""
    logprobs_s: float = 0.0
    """Seconds per pass for log-probs, the reference's too."""
    save_s: float = 0.0
    """Seconds that saving takes."""
    fail_at_update: int = 0
    """The update, counted from 1, that raises; 0: none."""
    fail_at_token: int = 0
    """Generation raises when rows have reached this many tokens; 0: never."""
    nan_updates: tuple[int, ...] = ()
    """Updates, counted from 1, whose gradient is not finite."""
    forget_version: int = 0
    """The rollout misses this version and all later ones: it says that it samples with the one before; 0: none."""
    die_at_token: int = 0
    """A replica that has decoded that many tokens of a row kills its process, `num_deaths` times in a run; 0: none."""
    num_deaths: int = 1
    keep_weights: bool = False
    """Replicas say that they have the weights that they are handed, and sample from those of the start."""
