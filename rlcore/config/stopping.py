"""The setting that ends a run early."""

from dataclasses import dataclass
from typing import Literal

from rlcore.config.options import option


@dataclass(frozen=True)
class StopConfig:
    """Early stopping by a metric."""

    metric: str = ""
    """The metric, such as eval/heldout/mean or reward/mean; empty: the run takes all its steps."""
    mode: Literal["max", "min"] = option("max", used_when="metric != ''")
    """max: higher is better; min: lower is."""
    patience: int = option(3, used_when="metric != ''", at_least=1)
    """The run ends after this many values in a row that do not improve on the best."""
    min_delta: float = option(0.0, used_when="metric != ''", at_least=0)
    """Least improvement that counts."""
