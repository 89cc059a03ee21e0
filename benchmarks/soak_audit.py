"""Audits a soak: every prompt is recorded once, and memory, descriptors and threads do not grow."""

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import psutil
from soak_run import PROMPTS, PROMPTS_PER_STEP, SAMPLES

from rlcore.report import metrics

ENDS = 3
"""Number of samples whose median stands for the beginning, or for the end, of a life."""


@dataclass(frozen=True)
class Sample:
    """The controller's resources at a moment without a fault."""

    life: int
    step: int
    resident_mib: float
    descriptors: int
    """Descriptors, except for those of TCP connections."""
    connections: int
    """TCP connections. They are kept for the next request: at most one per sample and service, and one per agent."""
    threads: int
    children: int
    children_mib: float


@dataclass
class Account:
    """Counts of how samples ended, and the problems that the audit found."""

    statuses: Counter[str] = field(default_factory=Counter)
    ended_by: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


def sampled(process: psutil.Process, life: int, step: int) -> Sample:
    """Measure now."""
    children = process.children(recursive=True)
    resident = 0
    for child in children:
        try:
            resident += child.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    mib = process.memory_info().rss / 2**20
    connections = len(process.net_connections("tcp"))
    return Sample(
        life,
        step,
        round(mib, 1),
        process.num_fds() - connections,
        connections,
        process.num_threads(),
        len(children),
        round(resident / 2**20, 1),
    )


def resources(samples: Sequence[Sample], growth: Mapping[str, float]) -> list[str]:
    """One line per resource that grew within a life: medians of its first and last samples are compared."""
    found = []
    for life, group in groupby(samples, key=lambda sample: sample.life):
        taken = list(group)
        if len(taken) < 2 * ENDS:
            continue
        for name, most in growth.items():
            values = [float(getattr(sample, name)) for sample in taken]
            more = statistics.median(values[-ENDS:]) - statistics.median(values[:ENDS])
            if more > most:
                found.append(f"life {life}: {name} grew by {more:g}, at most {most:g} are allowed: {values}")
    return found


def accounted(run: Path, steps: int) -> Account:
    """Checks that every sample of every prompt comes once per epoch, in the order of the epochs, in `steps` whole
    steps."""
    account = Account()
    issued: list[tuple[str, int]] = []
    for step in range(1, steps + 1):
        rows = metrics.read_trajectories(run, step)
        seen: dict[tuple[str, int], set[int]] = {}
        for row in rows:
            name = row["id"]
            seen.setdefault((name["prompt"], name["epoch"]), set()).add(name["sample"])
            account.statuses[row["status"]] += 1
            account.ended_by[str(row["agent"].get("ended_by", ""))] += 1
        keys = Counter(tuple(row["id"].values()) for row in rows)
        account.problems += [f"step {step}: {key} is there {count} times" for key, count in keys.items() if count > 1]
        for key, found in seen.items():
            if found != set(range(SAMPLES)):
                account.problems.append(f"step {step}: of {key} there are samples {sorted(found)}")
        if len(seen) != PROMPTS_PER_STEP:
            account.problems.append(f"step {step}: {len(seen)} prompts")
        issued += seen
    account.problems += _order(issued)
    return account


def _order(issued: Sequence[tuple[str, int]]) -> Iterator[str]:
    """One line per prompt that comes twice within an epoch, and per finished epoch that lacks prompts."""
    for (name, epoch), count in Counter(issued).items():
        if count > 1:
            yield f"prompt {name} comes {count} times in epoch {epoch}"
    per_epoch = Counter(epoch for _, epoch in issued)
    for epoch, count in per_epoch.items():
        if count != PROMPTS and epoch != max(per_epoch):
            yield f"epoch {epoch} has {count} of {PROMPTS} prompts"
