"""Shares of this machine for concurrent runs: cores and GPUs of each."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rlcore.runtime.gpus import VISIBLE, find_gpus


@dataclass(frozen=True)
class MachineShare:
    """Cores and GPUs of one run; None: all that this process may use."""

    cores: tuple[int, ...] | None = None
    gpus: tuple[str, ...] | None = None

    @contextmanager
    def confined(self) -> Iterator[None]:
        """Context in which this process sees only the share; processes started inside inherit it."""
        before, visible = _cores(), os.environ.get(VISIBLE)
        if self.cores is not None:
            os.sched_setaffinity(0, self.cores)
        if self.gpus is not None:
            os.environ[VISIBLE] = ",".join(self.gpus)
        try:
            yield
        finally:
            if self.cores is not None and before is not None:
                os.sched_setaffinity(0, before)
            if visible is not None:
                os.environ[VISIBLE] = visible
            elif self.gpus is not None:
                del os.environ[VISIBLE]


def shares_of_machine(num_shares: int) -> tuple[MachineShare, ...]:
    """Equal parts of the machine, the first ones larger by one; with fewer cores than parts, some share a core.

    With fewer GPUs than parts the last parts have none. A single part is the whole machine.
    """
    if num_shares == 1:
        return (MachineShare(),)
    cores, gpus = _cores(), tuple(gpu.uuid for gpu in find_gpus().visible)
    return tuple(
        MachineShare(
            cores and (cores[_part(len(cores), place, num_shares)] or (cores[place % len(cores)],)),
            gpus[_part(len(gpus), place, num_shares)] if gpus else None,
        )
        for place in range(num_shares)
    )


def _part(num_items: int, place: int, num_parts: int) -> slice:
    size, longer = divmod(num_items, num_parts)
    begin = place * size + min(place, longer)
    return slice(begin, begin + size + (place < longer))


def _cores() -> tuple[int, ...] | None:
    """Cores this process may run on; None if the system cannot report or restrict them."""
    return tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else None
