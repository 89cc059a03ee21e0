"""Layouts of ranks and engines that may shorten a step: candidates for the settings that the estimates of a plan
advise."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rlcore.config import RunConfig
from rlcore.plan.colocation import ROLLOUT
from rlcore.plan.machine_cards import Machine
from rlcore.plan.machine_times import RewardPool, StepLayout, StepSize, estimate_step
from rlcore.plan.run_plan import RunPlan
from rlcore.plan.shared_device import replica_devices

WORTH = 0.01
"""Minimum share of a step that a setting has to save to be advised."""
OTHER_SYNCS = ("shm", "tcp", "nccl")
"""Ways of weight sync that are tried in addition to the run's own and to files; without ipc, which has not run on a
GPU."""


@dataclass(frozen=True)
class FasterLayout:
    """A layout, and the least time that it can take."""

    ways: tuple[tuple[str, ...], ...]
    """Overrides for it, by preference; of these the first that is accepted counts."""
    least_s: float
    """Seconds of a step with room for all rows: no plan of this layout is faster."""


class LayoutSearch:
    """Orders the layouts of a machine by the least time of a step, each with the weight sync that suits it.

    A layout on separate devices may broadcast weights, and one on the same devices may not, so the two are chosen
    together.
    """

    def __init__(self, plan: RunPlan, size: StepSize, layout: StepLayout, machine: Machine) -> None:
        self._plan, self._size, self._layout, self._machine = plan, size, layout, machine
        self._devices = replica_devices(plan.config)

    def faster(self, step_s: float, *, stale: bool = False) -> list[FasterLayout]:
        """The layouts that may save enough of a step of `step_s` seconds, other than its own: the least time first.

        `stale`: with samples that are one version old, so that engines work while ranks train; ranks and engines are
        then on separate devices, the run's own layout is the first of equals, and the overrides contain the schedule.
        """
        found = [*(self._same() if stale else ()), *self._others(stale)]
        worthwhile = (layout for layout in found if layout.least_s < (1 - WORTH) * step_s)
        return sorted(worthwhile, key=lambda layout: layout.least_s)

    def _others(self, stale: bool) -> Iterator[FasterLayout]:
        gpus, config = self._machine.gpus, self._plan.config
        for trainers in sorted({gpus, 3 * gpus // 4, gpus // 2, gpus // 4} - {0}, reverse=True):
            for engines in sorted({trainers, gpus - trainers} - {0}):
                together = trainers + engines > gpus
                if engines % self._devices or (together and stale):
                    continue
                for sharding in _shardings(config, trainers):
                    if not sharding and self._is_own(trainers, engines, together):
                        continue
                    layout = self._least(trainers, engines // self._devices, bool(sharding), stale)
                    overrides = (
                        f"actor.data_parallel={trainers}",
                        f"rollout.replicas={engines // self._devices}",
                        *sharding,
                        *self._placement(together),
                    )
                    yield self._with_sync(overrides, layout, together)

    def _is_own(self, trainers: int, engines: int, together: bool) -> bool:
        """True for the run's own numbers on the same devices; an embedded sampler may be replaced by engines."""
        layout = self._layout
        own = (layout.trainers, layout.engines * layout.tensor_parallel, self._plan.layout.name == "colocated")
        return not layout.embedded and own == (trainers, engines, together)

    def _same(self) -> Iterator[FasterLayout]:
        """The run's own layout, with the schedule alone."""
        layout = self._least(self._layout.trainers, self._layout.engines, self._layout.sharded, stale=True)
        yield self._with_sync((), layout, together=False)

    def _least(self, trainers: int, engines: int, sharded: bool, stale: bool) -> StepLayout:
        """A layout in which everything that its plan may decide is as fast as can be."""
        layout = self._layout
        return replace(
            layout,
            trainers=trainers,
            engines=engines,
            tensor_parallel=self._devices,
            sharded=(sharded or self._plan.config.actor.sharding != "none") and trainers > 1,
            max_rows=max(layout.max_rows, StepLayout.max_rows),
            cached_rows=StepLayout.cached_rows,
            sleeps=False,
            offload=False,
            # A second model that trains has separate ranks, which the overrides may change.
            critic=layout.critic and layout.critic_model is None,
            # Reward models keep their ranks; each has its own devices at best.
            rewards=tuple(RewardPool((model,)) for pool in layout.rewards for model in pool.models),
            overlaps=stale,
        )

    def _with_sync(self, overrides: tuple[str, ...], layout: StepLayout, together: bool) -> FasterLayout:
        """The layout with the run's weight sync or one that saves enough, and without the latter if it is refused."""
        own = self._plan.weight_sync
        seconds = {way: self._seconds(replace(layout, weight_sync=way)) for way in self._syncs(own, together)}
        best = min(seconds, key=lambda way: seconds[way])
        schedule = ("schedule.max_staleness=1",) if layout.overlaps else ()
        tried = [(*overrides, *schedule)]
        if own not in seconds or seconds[best] < (1 - WORTH) * seconds[own]:
            tried.insert(0, (*overrides, f"rollout.weight_sync={best}", *schedule))
        return FasterLayout(tuple(tried), seconds[best])

    def _syncs(self, own: str, together: bool) -> list[str]:
        """The ways of weight sync that a layout may have: the run's own, files, and what its engines accept."""
        rollout = next(worker for worker in self._plan.workers if worker.request.role.name == ROLLOUT)
        others = () if rollout.request.takes_adapter else OTHER_SYNCS
        accepted = rollout.weight_sync if rollout.request.embedded_in is None else OTHER_SYNCS
        excluded = {"nccl"} if together else {"ipc"}
        if self._plan.facts.several_nodes or self._plan.cluster.abilities.elsewhere:
            excluded.add("shm")
        ways = dict.fromkeys((own, *(way for way in others if way in accepted), "disk"))
        return [way for way in ways if way not in excluded]

    def _seconds(self, layout: StepLayout) -> float:
        """The least seconds of a step: with a copy of the weights per node, or embedded, where that is faster."""
        copies = {1, self._layout.copies, self._machine.nodes}
        layouts = [
            replace(layout, copies=number, embedded=embedded)
            for number in copies
            for embedded in {False, self._layout.embedded}
            if layout.trainers % number == 0
        ]
        return min(estimate_step(self._size, found, self._machine).total for found in layouts)

    def _placement(self, together: bool) -> Sequence[str]:
        """The setting that places ranks and engines on the same devices or on separate ones, if it has to be changed.

        The planner moves roles by itself unless workers are on other machines.
        """
        layout, needed = self._plan.config.cluster.layout, "colocated" if together else "split"
        if layout == RunConfig().cluster.layout:
            return ("cluster.layout=colocated",) if together and self._plan.cluster.abilities.elsewhere else ()
        return () if layout == needed else (f"cluster.layout={needed}",)


def _shardings(config: RunConfig, trainers: int) -> list[tuple[str, ...]]:
    """The settings of shards to try: the run's own, and shards of several ranks where the run has none."""
    return [(), ("actor.sharding=fsdp2",)] if trainers > 1 and config.actor.sharding == "none" else [()]
