"""A stranger's cluster, from public names alone: workers are threads, and it counts what it launches and closes."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlcore import ConfigSection, RunConfig, hookimpl, option
from rlcore.cluster.kit import ReplicaGroup, ThreadWorkers
from rlcore.contracts.clusters import (
    Cluster,
    ClusterAbilities,
    ClusterContext,
    ClusterOffer,
    PoolPlan,
    ProcessUse,
    WorkerPlan,
)


@dataclass(frozen=True)
class CountingSettings:
    """Limits of the cluster that counts its replicas."""

    most: int = option(8, at_least=1)
    """Replicas of one role."""
    racks: int = option(1, at_least=1)
    """Above 1: pools may say `nodes`."""


class CountingCluster(Cluster):
    """Threads that are counted; the counts are in the run directory when it has closed."""

    def __init__(self, context: ClusterContext) -> None:
        super().__init__(context)
        self._threads = ThreadWorkers(context)
        self._counts = {"opened": 0, "launched": 0, "closed": 0}

    async def open(self) -> None:
        self._counts["opened"] += 1

    async def start(self, worker: WorkerPlan) -> ReplicaGroup[Any]:
        replicas = []
        for index in range(worker.request.replicas):
            replicas.append(await self._threads.start(worker, index, "cpu"))
            self._counts["launched"] += 1
        return ReplicaGroup(replicas)

    async def close(self) -> None:
        await self._threads.close()
        self._counts["closed"] += 1
        (self.context.run_dir / "counts.json").write_text(json.dumps(self._counts))


def abilities(config: RunConfig, section: CountingSettings) -> ClusterAbilities:
    several = section.racks > 1
    return ClusterAbilities(
        processes=ProcessUse.NONE, several_nodes=several, elsewhere=several, more_with="plugins.counting.racks=2"
    )


def problems(
    config: RunConfig, section: CountingSettings, pools: Sequence[PoolPlan], workers: Sequence[WorkerPlan]
) -> Sequence[str]:
    requests = [worker.request for worker in workers if worker.request.replicas > section.most]
    return [
        f"role '{it.role.name}' has {it.replicas} replicas, plugins.counting.most={section.most}" for it in requests
    ]


@hookimpl
def rlcore_config_sections() -> Sequence[ConfigSection]:
    return [ConfigSection("counting", CountingSettings)]


@hookimpl
def rlcore_clusters() -> Sequence[ClusterOffer]:
    return [ClusterOffer("counting", CountingCluster, abilities, problems)]
