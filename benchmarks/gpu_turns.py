"""The run of `gpu_check.py` in which actor and vLLM take turns: its settings, and its tables.

The other runs are small enough for vLLM to stay awake, so only this one shows sleeping and waking.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

GIB = 2**30
SHAPE = "1.5B"
"""The model: a smaller one leaves so much of an H200 free that vLLM stays awake."""
SHARE = 0.7
"""Share of the device that vLLM reserves. On an H100 (80 GB) and an H200 it does not fit next to an update, and fits
next to resting state; on an H100 the plan offloads the actor while vLLM samples."""
STEPS = 3
CHANGE = GIB
"""Bytes by which memory has to change for a point of the printed timeline; the record has all points."""
SECONDS = ("sleep", "wake", "generate", "passes", "update", "weights")


def overrides() -> list[str]:
    """The settings with which the plan takes turns."""
    return [f"plugins.vllm.gpu_memory_frac={SHARE}"]


def table(result: Mapping[str, Any]) -> Iterator[str]:
    """Seconds and memory of each step, and the timeline of memory, as Markdown."""
    (rows, found), *_ = ((rows, found) for rows, found in result.items() if isinstance(found, Mapping))
    slept = ", ".join(found["sleeping"]) or "none, so this record has no turns"
    planned = max((size for pool in found["planned_on_devices"].values() for size in pool.values()), default=0)
    yield (
        f"{SHAPE}, {rows} rows, vLLM has {SHARE:g} of the device. Roles that sleep while the actor trains: {slept}. "
        f"Planned {planned / GIB:.2f} GiB, peak {found['peak_bytes'] / GIB:.2f}."
    )
    yield ""
    yield "| step | " + " | ".join(f"{name}, s" for name in SECONDS) + " | least memory, GiB | most, GiB |"
    yield "|---" * (len(SECONDS) + 3) + "|"
    for number, step in enumerate(found["steps"], 1):
        seconds = " | ".join(_seconds(step.get(f"time/{name}_s")) for name in SECONDS)
        used = _during(found, number)
        yield f"| {number} | {seconds} | {min(used) / GIB:.2f} | {max(used) / GIB:.2f} |"
    yield ""
    marks = ", ".join(f"{name} {seconds:.1f}" for name, seconds in found["marks"].items())
    yield f"Seconds at which these were done: {marks}. Memory in GiB from these seconds on:"
    yield ""
    yield ", ".join(f"{seconds:.1f}: {used / GIB:.1f}" for seconds, used in changes(found["timeline"]))


def changes(points: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    """The points of a timeline at which memory differs by at least `CHANGE` from the point before that is listed."""
    found: list[tuple[float, float]] = []
    for seconds, used in points:
        if not found or abs(used - found[-1][1]) >= CHANGE:
            found.append((seconds, used))
    return found


def _during(found: Mapping[str, Any], step: int) -> list[float]:
    """Memory in use during a step; 0 if it was shorter than the time between two samples."""
    began = found["marks"]["started" if step == 1 else f"step {step - 1}"]
    ended = found["marks"][f"step {step}"]
    return [used for seconds, used in found["timeline"] if began <= seconds <= ended] or [0.0]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
