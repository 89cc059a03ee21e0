"""The setting that ends a run early."""

from dataclasses import dataclass
from typing import Literal

from rlcore.config.options import option


@dataclass(frozen=True)
class StopConfig:
    """An early end of the run, by a metric that gets no better."""

    metric: str = ""
    """The metric, such as eval/heldout/mean or reward/mean; empty: the run takes all its steps."""
    mode: Literal["max", "min"] = option("max", used_when="metric != ''")
    """max: higher is better; min: lower is."""
    patience: int = option(3, used_when="metric != ''", at_least=1)
    """Values in a row that are not better than the best before them, after which the run ends."""
    min_delta: float = option(0.0, used_when="metric != ''", at_least=0)
    """A value is better if it is better by more than this."""
