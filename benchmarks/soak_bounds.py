"""Bounds of the soak per engine: models start, step and end more slowly than the null engine."""

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
    """Bounds of one engine; those with the suffix `_s` are seconds."""

    start_s: float = 600.0
    """The longest time until the first step of a life."""
    stuck_s: float = 300.0
    """The longest time without a step after that; a longer one means that the run hangs."""
    end_s: float = 120.0
    """The longest time until a life ends that got a signal, or whose disk is full."""
    gone_s: float = 10.0
    """The longest time until the processes of an ended life are gone."""
    growth: Mapping[str, float] = field(default_factory=lambda: GROWTH)
    """The largest growth within a life, per resource: connections come and go, and allocation varies."""


MODELS = Bounds(1200.0, 600.0, 300.0, 30.0, {**GROWTH, "children_mib": 512.0})
"""Bounds of hf. Pages that processes of torch share count once per process, and each process warms up."""
VLLM = Bounds(1800.0, 1200.0, 600.0, 60.0, MODELS.growth)
"""Bounds of vLLM. If both engines were killed, a step waits for their restart: minutes on busy cores."""
BOUNDS = {"null": Bounds(), "hf": MODELS, "vllm": VLLM}
