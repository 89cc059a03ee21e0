"""The mesh of ranks that shard a model: copies of the weights on neighbouring ranks, and slices of sequences within.

A copy within one node gathers its layers over that node's links. Only gradients travel between nodes, once per update.
"""

from collections.abc import Sequence
from dataclasses import replace

from rlcore.config import RunConfig
from rlcore.contracts.clusters import PoolPlan, WorkerPlan
from rlcore.contracts.requests import ModelFacts
from rlcore.errors import PlanError
from rlcore.plan.activations import largest_micro_batch, masked_row, update_bytes
from rlcore.plan.machine_facts import GIB, Facts
from rlcore.plan.memory import CONTEXT_BYTES, gathered_for_update, training_bytes_per_parameter
from rlcore.types import SharedPrefix


def nodes_of_ranks(config: RunConfig) -> int:
    """The number of nodes of the actor's ranks, as far as `cluster.pools` says; the nodes of a union count as one."""
    pool = config.cluster.pools.get(config.cluster.train_pool)
    return 1 if pool is None or pool.colocates else pool.nodes


def copies_over_nodes(config: RunConfig, facts: Facts) -> int:
    """The number of nodes if each holds a copy of the actor's sharded weights by default; else 1."""
    return 1 if why_one_copy(config, facts) else nodes_of_ranks(config)


def why_one_copy(config: RunConfig, facts: Facts) -> str:
    """Reason why all ranks shard one copy; empty if each node holds one."""
    engine, nodes = config.actor, nodes_of_ranks(config)
    if engine.sharding == "none":
        return "nothing is shared out between nodes"
    ranks, rest = divmod(engine.data_parallel, nodes)
    if rest or ranks < 2 or ranks % engine.context_parallel:
        slices = f" with {engine.context_parallel} slices" if engine.context_parallel > 1 else ""
        return f"{engine.data_parallel} ranks on {nodes} nodes{slices} do not give each node a copy of several ranks"
    needed, size = _needed_bytes(config, facts, nodes), facts.usable_gpu_bytes
    if needed is None or size is None:
        return "the memory of a device or of the model is unknown, so whether a node can hold a copy is unknown"
    if needed > size:
        return (
            f"a copy for each of {nodes} nodes needs {needed / GIB:.1f} GiB of a device, which has {size / GIB:.1f}: "
            f"all {engine.data_parallel} ranks share out one"
        )
    return ""


def _needed_bytes(config: RunConfig, facts: Facts, copies: int) -> int | None:
    """Bytes of a rank with this many copies and the largest micro-batch; None if they are unknown."""
    if facts.parameters is None or facts.shape is None:
        return None
    engine = replace(config.actor, dp_replicate=copies)
    size = largest_micro_batch(config, engine, SharedPrefix.TREE)
    held = CONTEXT_BYTES + training_bytes_per_parameter(engine) * facts.parameters
    held += gathered_for_update(engine, ModelFacts(facts.parameters, facts.shape))
    masked = masked_row(config, facts.shape)
    return int(held) + update_bytes(facts.shape, engine, size, config.cluster.device, masked)


def check_copies(workers: Sequence[WorkerPlan], pools: Sequence[PoolPlan]) -> None:
    """PlanError for copies of weights that do not divide ranks, slices or nodes evenly."""
    nodes = {pool.name: pool.nodes for pool in pools}
    for plan in workers:
        engine = plan.request.engine
        if engine is not None and plan.request.embedded_in is None and engine.dp_replicate > 1:
            _check(plan, engine.dp_replicate, engine.context_parallel, nodes[plan.request.pool])


def _check(plan: WorkerPlan, copies: int, slices: int, nodes: int) -> None:
    ranks, settings = plan.request.ranks, plan.request.settings or plan.request.role.name
    who, otherwise = f"role '{plan.request.role.name}': {settings}.dp_replicate={copies}", f"{settings}.dp_replicate=1"
    if ranks % copies or ranks == copies:
        raise PlanError(
            f"{who}: {settings}.data_parallel={ranks}; needs a number that divides it and leaves each copy several "
            f"ranks, or {otherwise}"
        )
    size, on_node = ranks // copies, -(-ranks // nodes)
    if size % slices:
        raise PlanError(
            f"{who}: a copy has {size} ranks, and {settings}.context_parallel={slices} ranks hold slices of the same "
            f"sequences; needs a context_parallel that divides {size}, or {otherwise}"
        )
    if size % on_node and on_node % size:
        raise PlanError(
            f"{who}: a copy has {size} ranks and a node {on_node}, so copies begin in the middle of nodes; needs "
            f"{settings}.dp_replicate={nodes}, a copy for each node, or {otherwise}"
        )
