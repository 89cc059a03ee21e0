"""Plans the weight sync from the actor to the rollout."""

from collections.abc import Sequence

from rlcore.config import RunConfig
from rlcore.contracts.clusters import PoolPlan, WorkerPlan
from rlcore.errors import PlanError
from rlcore.errors.checks.interfaces import defines
from rlcore.plan.colocation import actor_pool, shares_devices
from rlcore.plan.run_plan import WeightsKind


def plan_weights(
    config: RunConfig, workers: Sequence[WorkerPlan], pools: Sequence[PoolPlan], *, elsewhere: bool
) -> WeightsKind:
    """The kind of weight sync from the actor to the rollout; '' when the rollout is embedded in the actor.

    PlanError if the rollout does not support the kind that the settings ask for. `elsewhere`: workers run on machines
    that the planner cannot see.
    """
    rollout = next(plan for plan in workers if plan.request.role.name == "rollout")
    by, inside = config.rollout.weight_sync, rollout.request.embedded_in
    who = f"{rollout.cls.__qualname__} of {rollout.provided_by}"
    if inside is not None:
        if by != "disk":
            raise PlanError(
                f"rollout.weight_sync={by}: the rollout is served inside '{inside.name}' and has no copy of the "
                "weights; leave it out, or choose a rollout.backend that has one"
            )
        return ""
    actor = next(plan for plan in workers if plan.request.role.name == "actor")
    for plan, method in ((actor, "weights"), (rollout, "load_weights")):
        if not defines(plan.cls, plan.request.role.interface, method):
            raise PlanError(
                f"rollout.backend={rollout.request.backend}: the rollout has a copy of the weights, and "
                f"{plan.cls.__qualname__} of {plan.provided_by} defines no {method}(); needs one, or a rollout that is "
                "served inside the actor"
            )
    if by not in rollout.weight_sync:
        raise PlanError(
            f"rollout.weight_sync={by}: {who} does not take weights that way (its offer's weight_sync); choose from: "
            f"{', '.join(sorted(rollout.weight_sync)) or 'another rollout.backend'}"
        )
    if by == "shm" and elsewhere:
        raise PlanError(
            f"rollout.weight_sync=shm shares memory of one machine, and cluster.backend={config.cluster.backend} may "
            "put the actor and replicas of the rollout on several; choose tcp or disk"
        )
    if by == "nccl" and config.rollout.weights_transport == "nccl":
        _check_nccl(config, rollout, workers, pools)
    if rollout.request.takes_adapter and by != "disk":
        raise PlanError(
            f"rollout.weight_sync={by} sends whole weights, and {who} takes an adapter alone, which is handed over as "
            "files; choose rollout.weight_sync=disk, or another rollout.backend"
        )
    if rollout.request.takes_adapter:
        return "adapter"
    return "directory" if by == "disk" else by


def _check_nccl(
    config: RunConfig, rollout: WorkerPlan, workers: Sequence[WorkerPlan], pools: Sequence[PoolPlan]
) -> None:
    """PlanError unless actor and rollout have separate CUDA devices."""
    if config.cluster.device != "cuda":
        raise PlanError(
            f"rollout.weight_sync=nccl broadcasts between CUDA devices, and cluster.device={config.cluster.device}; "
            "choose tcp, shm or disk, or rollout.weights_transport=gloo, which broadcasts between hosts"
        )
    if shares_devices(rollout, actor_pool(pools, workers), workers):
        raise PlanError(
            "rollout.weight_sync=nccl cannot connect two processes on one device, and the rollout is on devices that "
            "the actor trains on; choose shm, tcp or disk, or cluster.layout=split"
        )
