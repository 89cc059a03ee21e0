"""Bounds that the soak holds a run to, per engine: models start, step and end more slowly than the null engine."""

from collections.abc import Mapping
from dataclasses import dataclass, field

GROWTH = {
    "descriptors": 8.0,
    "connections": 64.0,
    "threads": 4.0,
    "children": 1.0,
    "resident_mib": 16.0,
    "children_mib": 64.0,
}


@dataclass(frozen=True)
class Bounds:
    """Bounds of one engine, in seconds where they say so."""

    start_s: float = 600.0
    """Time in which a life takes its first step."""
    stuck_s: float = 300.0
    """Without a step for so long after that the run hangs."""
    end_s: float = 120.0
    """Time in which a life that was asked to end, or has no room to write, ends."""
    gone_s: float = 10.0
    """Time in which the processes of a life that has ended are gone."""
    growth: Mapping[str, float] = field(default_factory=lambda: GROWTH)
    """Growth that a life may end with, per resource: connections come and go, and allocation varies."""


MODELS = Bounds(1200.0, 600.0, 300.0, 30.0, {**GROWTH, "children_mib": 512.0})
"""Pages that processes of torch share count once for each, and each warms up."""
VLLM = Bounds(1800.0, 1200.0, 600.0, 60.0, MODELS.growth)
"""A step waits where both engines were killed and start again: minutes, where other work keeps the cores busy."""
BOUNDS = {"null": Bounds(), "hf": MODELS, "vllm": VLLM}
