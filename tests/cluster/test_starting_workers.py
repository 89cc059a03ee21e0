"""The garbage collector runs rarely while workers import what they need, and as Python has it while they work."""

import asyncio
import gc
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlcore.cluster.host import WorkerHost
from rlcore.contracts.clusters import Shipment
from rlcore.contracts.workers import Worker, WorkerContext
from rlcore.imports import STARTING_THRESHOLDS, collecting_rarely

PYTHONS = (700, 10, 10)
OWN = (5000, 7, 7)


@pytest.fixture(autouse=True)
def _thresholds_of_python() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(*PYTHONS)
    yield
    gc.set_threshold(*before)


class Telling(Worker):
    """Tells the thresholds that it was set up with."""

    def setup(self) -> None:
        self.began = gc.get_threshold()

    def thresholds(self) -> Any:
        return self.began, gc.get_threshold()


class Deciding(Telling):
    """Sets thresholds."""

    def setup(self) -> None:
        super().setup()
        gc.set_threshold(*OWN)


async def built(cls: type[Telling]) -> Any:
    """The thresholds of a worker during its setup, and during a call."""
    context: Any = WorkerContext("probe", 0, 0, 1, None, None, {}, Path(), 0, 0, "cpu")  # type: ignore[arg-type]
    host = WorkerHost()
    host.build(Shipment("probe[0]", "probe", "", (), pickle.dumps((cls, context))))
    return await host.call("probe", "thresholds", (), {})


def test_a_worker_is_set_up_with_rare_collections_and_works_with_those_of_python() -> None:
    assert asyncio.run(built(Telling)) == (STARTING_THRESHOLDS, PYTHONS)
    assert asyncio.run(built(Deciding)) == (STARTING_THRESHOLDS, OWN), "a worker may decide for itself"


def test_thresholds_return_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), collecting_rarely():
        _ = 1 / 0
    assert gc.get_threshold() == PYTHONS
