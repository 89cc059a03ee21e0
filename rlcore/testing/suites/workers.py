"""The checks that all workers share, and the batches for workers with models."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from rlcore.cluster.thread_workers import ThreadReplica
from rlcore.contracts.workers import Worker
from rlcore.testing.suites.bench import Bench
from rlcore.testing.suites.harness import Suite, loaded, need_conforming, run, scratch
from rlcore.testing.tiny import random_batch
from rlcore.types import Batch, Float32s

T = TypeVar("T")


class WorkerSuite(Suite):
    """A worker class, which runs on a thread as in the local cluster; `target` is the class."""

    interface: type[Worker]
    role: str
    host: Any = ""
    """The class of the actor that hosts it; empty: none."""
    references: Mapping[str, str] = {"policy_loss": "rlcore.algo.loss:clip"}
    """Functions of the worker, by purpose."""
    specs: Mapping[str, Any] = {}
    """`WorkerRequest.spec` by role: a `RewardModel` for a reward replica."""
    vocabulary: int = 256
    """Token ids are below this."""
    limit_s: float = 60.0
    """Seconds that a check may take."""

    def use(self, work: "Callable[[Work], Awaitable[T]]") -> T:
        """The result of `work` with fresh workers, which are closed afterwards. They may leave nothing behind."""

        async def main() -> T:
            config = self.config()
            with scratch() as run_dir:
                bench = Bench(config, run_dir, self.references, self.specs)
                try:
                    return await work(Work(self, bench, self.section(config)))
                finally:
                    await bench.close()

        return run(main(), self.limit_s)

    def test_it_is_what_its_role_calls_for(self) -> None:
        """It inherits from the role's interface, and keeps kind and parameters of every method."""
        need_conforming(self.who, self.load(), self.interface)

    def test_it_closes_also_without_a_setup(self) -> None:
        """A worker is in this state if `setup` failed."""

        async def main(work: "Work") -> None:
            self.load()(work.bench.context(self.role, work.section)).close()

        self.use(main)

    def test_it_starts_and_ends_without_leaving_anything(self) -> None:
        """It leaves no thread, process or descriptor."""

        async def main(work: "Work") -> None:
            await work.start()

        self.use(main)


class Work:
    """The workers of one check."""

    def __init__(self, suite: WorkerSuite, bench: Bench, section: Any) -> None:
        self.suite, self.bench, self.section = suite, bench, section
        self.actor: ThreadReplica[Any] | None = None
        """The host of the worker that was started last."""

    async def start(self) -> ThreadReplica[Any]:
        """A new worker of the target, with its host."""
        suite = self.suite
        self.actor = await self.bench.start(loaded(suite.host), "actor", self.section) if suite.host else None
        return await self.bench.start(suite.load(), suite.role, self.section, self.actor)


def batch_of(vocabulary: int, seed: int = 0, advantages: float | None = None) -> Batch:
    """Eight rows in four groups, ready for an update; `advantages` is that of every row."""
    batch = random_batch(seed=seed, advantages=None if advantages is None else [advantages] * 8)
    tokens = batch.tokens
    return replace(batch, tokens=replace(tokens, token_ids_BT=tokens.token_ids_BT % vocabulary))


def need_per_token(suite: Suite, what: str, found_BT: Any, batch: Batch) -> None:
    """`Breach` unless `found_BT` is a finite float32 array of the batch's shape."""
    shape = batch.tokens.token_ids_BT.shape
    form = (getattr(found_BT, "shape", None), str(getattr(found_BT, "dtype", type(found_BT).__name__)))
    suite.need(form == (shape, "float32"), f"{what} are {form[1]} of shape {form[0]}; needs float32 {shape}")
    mask_BT = batch.tokens.loss_mask_BT
    suite.need(bool(np.isfinite(found_BT[mask_BT]).all()), f"{what} are not finite where a token was sampled")


def same_bits(one: Float32s, other: Float32s) -> bool:
    """True if the arrays are equal bit for bit."""
    return one.shape == other.shape and one.tobytes() == other.tobytes()
