"""Judges a series of controller steps: the share of their time in a real step, and the growth of memory."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from measure import summary

STEP_S = 60.0
"""Seconds of a step of a real run."""
MOST_FRAC = 0.1
WARM_STEPS = 10
"""Number of first steps that do not count."""
FLAT_FRAC = 0.01
FLAT_STEPS = 100
"""Memory is flat if the upper end of its growth over this number of steps is less than `FLAT_FRAC` of it ..."""
RISE_FRAC = 0.05
"""... or if its growth is not significant, and its highest value exceeds the first by less than this share."""

T_95 = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 7: 2.365, 10: 2.228, 15: 2.131, 20: 2.086, 30: 2.042, 60: 2.0}
"""Student's t, two-sided 95 %, by degrees of freedom; others take the value of the next smaller one."""


@dataclass(frozen=True)
class Trend:
    """Growth per value, with its 95 % interval."""

    slope: float
    low: float
    """Lower end of the 95 % interval."""
    high: float


def trend(values: Sequence[float]) -> Trend:
    """Ordinary least squares over 0, 1, 2, ...; ValueError for fewer than three values.

    Residuals of neighbours are similar if memory is allocated and freed in lumps. So the interval counts only the
    number of independent values, by their correlation r with the previous one: n (1 - r) / (1 + r).
    """
    num = len(values)
    if num < 3:
        raise ValueError(f"trend: {num} values; needs at least three")
    middle, mean = (num - 1) / 2, math.fsum(values) / num
    spread = math.fsum((index - middle) ** 2 for index in range(num))
    slope = math.fsum((index - middle) * (value - mean) for index, value in enumerate(values)) / spread
    residuals = [value - mean - slope * (index - middle) for index, value in enumerate(values)]
    squares = math.fsum(residual**2 for residual in residuals)
    pairs = math.fsum(left * right for left, right in pairwise(residuals))
    alike = min(0.95, max(0.0, pairs / squares)) if squares else 0.0
    independent = max(3.0, num * (1 - alike) / (1 + alike))
    error = math.sqrt(squares / (independent - 2) / spread)
    quantile = T_95[max(bound for bound in T_95 if bound <= independent - 2)]
    return Trend(slope, slope - quantile * error, slope + quantile * error)


def judged(wall_s: Sequence[float], cpu_s: Sequence[float], resident_bytes: Sequence[int]) -> dict[str, Any]:
    """The verdict on steps with these seconds, and this memory after each. ValueError for fewer than four."""
    warm = min(WARM_STEPS, len(wall_s) - 4)
    if warm < 0:
        raise ValueError(f"scale: {len(wall_s)} steps; needs at least four")
    wall, cpu, after = summary(wall_s[warm:]), summary(cpu_s[warm:]), resident_bytes[warm:]
    growth, late = trend(after), trend(after[len(after) // 2 :] if len(after) >= 6 else after)
    share = max(wall["median"], cpu["median"]) / STEP_S
    return {
        "steps": len(wall_s),
        "warm_steps": warm,
        "wall_s": wall,
        "cpu_s": cpu,
        "share_of_60_s": share,
        "resident_warm_bytes": after[0],
        "resident_end_bytes": after[-1],
        "growth_bytes_a_step": asdict(growth),
        "growth_of_second_half": asdict(late),
        "cheap": share < MOST_FRAC,
        "flat": late.high * FLAT_STEPS < FLAT_FRAC * after[0]
        or (late.low <= 0.0 and max(after) - after[0] < RISE_FRAC * after[0]),
    }
