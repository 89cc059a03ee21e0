"""The plugin of a rollout that takes weights by some ways, and the model of 7B that its runs have."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlcore.contracts.requests import ModelFacts, ModelShape
from rlcore.testing.packages import importable, write_package

READER = """
    from rlcore import RolloutWorker, WorkerClass, hookimpl

    class Reader(RolloutWorker):
        def setup(self): ...

        async def load_weights(self, handle): ...

        async def sleep(self): ...

        async def wake(self): ...

        async def generate(self, requests):
            yield

    @hookimpl
    def rlcore_worker_classes():
        return [WorkerClass(RolloutWorker, "reader", Reader, isolated=True, weight_sync=frozenset({ways}))]
"""
SHAPE = ModelShape("qwen2", 28, 3584, 18944, 512, 152064, True)
MODEL = ModelFacts(7_615_616_512, SHAPE)


@contextmanager
def installed_reader(site: Path, name: str, *ways: str) -> Iterator[Path]:
    """Context in which the plugin of that name is installed."""
    with importable(site) as place:
        write_package(place, name, READER.replace("{ways}", repr(set(ways))))
        yield place
