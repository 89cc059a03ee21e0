"""The suite of clusters is red on clusters that break a promise: for each check one that only it is about."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from rlcore.cluster.kit import ReplicaGroup, ThreadWorkers
from rlcore.cluster.local import LocalCluster
from rlcore.contracts.clusters import Cluster, ClusterAbilities, ClusterOffer
from rlcore.errors import WorkerError
from rlcore.testing.leaks import leaks
from rlcore.testing.suites.cluster import ClusterSuite
from rlcore.testing.suites.harness import all_checks, failures


class Threads(Cluster):
    """A cluster without fault."""

    def __init__(self, context):
        super().__init__(context)
        self.threads = ThreadWorkers(context)

    async def open(self):
        pass

    async def start(self, worker):
        replicas = [await self.threads.start(worker, index, "cpu") for index in range(worker.request.replicas)]
        return self.group(replicas)

    def group(self, replicas):
        return ReplicaGroup(replicas)

    async def close(self):
        await self.threads.close()


class Plain(Threads):
    def open(self):
        pass


class Reversed(Threads):
    def group(self, replicas):
        return ReplicaGroup(replicas[::-1])


class Alone(Threads):
    async def start(self, worker):
        if worker.request.role.name == "embedded_probe":
            worker = replace(worker, request=replace(worker.request, embedded_in=None))
        return await super().start(worker)


class Proxy:
    """A replica, except for what a subclass does."""

    def __init__(self, replica: Any) -> None:
        self._replica = replica

    def __getattr__(self, name: str) -> Any:
        return getattr(self._replica, name)


class Swallowing(Proxy):
    async def call(self, method, *args, **kwargs):
        try:
            return await self._replica.call(method, *args, **kwargs)
        except WorkerError:
            return None


class Short(Proxy):
    async def stream(self, method, *args, **kwargs):
        items = self._replica.stream(method, *args, **kwargs)
        try:
            async for value in items:
                if value < 64:
                    yield value
        finally:
            await items.aclose()


class Unmarked(Proxy):
    async def call(self, method, *args, **kwargs):
        def plain(): ...

        plain.__name__ = method.__name__
        return await self._replica.call(plain, *args, **kwargs)


class Queues(Threads):
    def group(self, replicas):
        return ReplicaGroup([Unmarked(replica) for replica in replicas])


class Swallows(Threads):
    def group(self, replicas):
        return ReplicaGroup([Swallowing(replica) for replica in replicas])


class Shortens(Threads):
    def group(self, replicas):
        return ReplicaGroup([Short(replica) for replica in replicas])


class Careless(Threads):
    async def start(self, worker):
        try:
            return await super().start(worker)
        except WorkerError:
            return ReplicaGroup([])


class Forgetful(Threads):
    async def close(self):
        self.threads._started.clear()
        await super().close()


class Once(LocalCluster):
    def __init__(self, context):
        cluster = replace(context.config.cluster, max_restarts=0)
        super().__init__(replace(context, config=replace(context.config, cluster=cluster)))


class Mixing(Threads):
    """Remembers the worker that it is starting."""

    async def start(self, worker):
        self.worker = worker
        replicas = []
        for index in range(worker.request.replicas):
            await asyncio.sleep(0.01)
            replicas.append(await self.threads.start(self.worker, index, "cpu"))
        return self.group(replicas)


MOODS: Iterator[bool] = iter([False, True] * 100)


def moody(config, section):
    return ClusterAbilities(labels=next(MOODS))


MUTANTS: dict[str, ClusterOffer] = {
    "test_its_class_is_a_cluster": ClusterOffer("odd", Plain),
    "test_it_says_the_same_of_itself_whenever_it_is_asked": ClusterOffer("odd", Threads, moody),
    "test_it_starts_every_replica_of_each_role_and_tells_it_who_it_is": ClusterOffer("odd", Reversed),
    "test_an_embedded_worker_is_in_the_process_of_its_host": ClusterOffer("odd", Alone),
    "test_calls_return_what_the_method_returns_and_raise_what_it_raises": ClusterOffer("odd", Swallows),
    "test_a_method_marked_as_concurrent_answers_while_another_one_computes": ClusterOffer("odd", Queues),
    "test_a_stream_yields_everything_and_ends_with_its_reader": ClusterOffer("odd", Shortens),
    "test_what_does_not_start_is_named_and_nothing_is_left": ClusterOffer("odd", Careless),
    "test_close_closes_every_worker_once": ClusterOffer("odd", Forgetful),
    "test_an_isolated_replica_that_dies_is_lost_and_restored": ClusterOffer("odd", Once),
}


def together(config, section):
    return ClusterAbilities(starts_together=True)


def suite_of(offer: ClusterOffer, seconds: float = 30.0) -> type[ClusterSuite]:
    class Mutant(ClusterSuite):
        target = offer
        restarts = issubclass(offer.cls, LocalCluster)
        limit_s = seconds

    return Mutant


def test_every_check_has_a_mutant() -> None:
    assert sorted(MUTANTS) == sorted(all_checks(ClusterSuite))


@pytest.mark.slow
def test_a_cluster_without_fault_passes_them_all() -> None:
    assert failures(suite_of(ClusterOffer("odd", Threads))) == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("offer", "is_red"),
    [
        pytest.param(ClusterOffer("odd", Mixing, together), True, id="mixes up roles that start together"),
        pytest.param(ClusterOffer("odd", Mixing), False, id="starts one after another"),
        pytest.param(ClusterOffer("odd", Threads, together), False, id="starts them together"),
    ],
)
def test_a_cluster_that_says_that_roles_start_together_is_held_to_it(offer: ClusterOffer, is_red: bool) -> None:
    check = "test_it_starts_every_replica_of_each_role_and_tells_it_who_it_is"
    assert list(failures(suite_of(offer), [check])) == ([check] if is_red else [])


SLOW = "test_an_isolated_replica_that_dies_is_lost_and_restored"


@pytest.mark.parametrize(
    "check", [pytest.param(check, marks=[pytest.mark.fault] if check == SLOW else []) for check in MUTANTS]
)
def test_a_check_is_red_on_its_mutant(check: str) -> None:
    with leaks():
        found = failures(suite_of(MUTANTS[check], 10.0 if "dies" in check else 30.0), [check])
    assert list(found) == [check]
    assert "cluster 'odd': " in found[check]
