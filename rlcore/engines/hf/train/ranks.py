"""Data-parallel ranks: each computes a share of every batch, and their gradients are summed.

The controller has already weighted every row (`weights_B`), so the gradient of a mini-batch is the plain sum over its
parts. No rank needs to know the rows of another, and a rank may have none.

Every rank has the whole model and optimizer, and makes the same step.
"""

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous as rendezvous_at

from rlcore.contracts.workers import WorkerContext
from rlcore.data.batch import needed_tokens, select, shared_prefixes, suffix_lengths
from rlcore.data.dealt import dealt, split
from rlcore.data.row_costs import Float64s, LayerCost, row_costs
from rlcore.data.token_tree import tree_tokens
from rlcore.engines.hf.train.context import ContextGroup
from rlcore.errors import ConfigError, WorkerError, boundary
from rlcore.types import Batch, Float32s, Int64s, SharedPrefix

BUCKET_BYTES = 25 << 20
"""Gradients are sent together up to this size, because small messages are dominated by their overhead."""
MEET_S = 300.0
"""Timeout for all ranks to reach the rendezvous."""
SEEN_S, LOOK_S = 30.0, 0.05
"""Timeout until a rank's file is visible to the others, and polling interval."""
EXCHANGE_S = 21600.0
"""Timeout for a slower rank, the same as the controller's for a call; a dead rank is noticed at once."""
IDLE_S = 30.0 * 86400.0
"""Timeout for the first rank's next instruction; between two of them a run may train for hours."""


class Ranks:
    """This process among the ranks of its replica."""

    def __init__(self, rank: int, num: int, rendezvous: str, device: torch.device, context_parallel: int = 1) -> None:
        """Meet the other ranks; WorkerError if they do not come, ConfigError if `context_parallel` does not divide
        them.

        `context_parallel` neighbours hold slices of the same sequences.
        """
        if num % context_parallel:
            raise ConfigError(f"context_parallel={context_parallel}: {num} ranks; needs a number that divides them")
        self.rank, self.num, self.device = rank, num, device
        self._groups: dict[tuple[tuple[int, ...], ...], Any] = {}
        self._idle: Any = None
        with boundary(f"rank {rank} of {num}: meeting the others at {rendezvous}", WorkerError):
            store, *_ = next(rendezvous_at(rendezvous, rank, num, timeout=timedelta(seconds=MEET_S)))
            store.set(f"here/{rank}", "yes")
            store.wait([f"here/{index}" for index in range(num)], timedelta(seconds=MEET_S))
            store.set_timeout(timedelta(seconds=EXCHANGE_S))  # groups of NCCL connect in it at their first exchange
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                store=store,
                rank=rank,
                world_size=num,
                timeout=timedelta(seconds=EXCHANGE_S),
            )
            self.order = by_node([rank["node"] for rank in self.gather({"node": os.uname().nodename})])
            """The ranks in the order of their places: neighbours are on one node."""
            self.place = self.order.index(rank)
            """This rank's index in the order."""
            self.context = self._context(context_parallel)
            """The ranks that compute the same rows as this one; None: it computes them alone."""

    def _context(self, size: int) -> ContextGroup | None:
        if size == 1:
            return None
        group = self.group([self.order[start : start + size] for start in range(0, self.num, size)])
        return ContextGroup(self.place % size, size, group)

    def group(self, division: Sequence[Sequence[int]]) -> Any:
        """The process group of this rank; each rank is in one list of the division. All ranks must call this."""
        key = tuple(tuple(ranks) for ranks in division)
        if key not in self._groups:
            groups = [dist.new_group(list(ranks), timeout=timedelta(seconds=EXCHANGE_S)) for ranks in key]
            self._groups[key] = next(group for group, ranks in zip(groups, key, strict=True) if self.rank in ranks)
        return self._groups[key]

    def micro_batches(
        self, batch: Batch, max_tokens: int, shared_prefix: SharedPrefix, cost: LayerCost, *, together: bool
    ) -> list[Int64s]:
        """Rows of each micro-batch of this rank, or of its context group.

        Ranks that compute each micro-batch `together` have equally many, some possibly without rows.
        """
        size = 1 if self.context is None else self.context.num
        num, own = self.num // size, self.place // size
        if together:
            return dealt(batch, max_tokens, shared_prefix, cost, num)[own]
        rows = np.flatnonzero(shares(batch, shared_prefix, cost, num) == own)
        parts = split(select(batch, rows), max_tokens, shared_prefix) if len(rows) else []
        return [rows[part] for part in parts]

    @property
    def reports(self) -> bool:
        """True for the rank that reports on its rows: one of those that compute the same ones."""
        return self.context is None or self.context.rank == 0

    def sum_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Sum the gradients over the ranks; one that no rank has stays None."""
        held = torch.tensor([float(parameter.grad is not None) for parameter in parameters], device=self.device)
        dist.all_reduce(held)
        chosen = [parameter for parameter, count in zip(parameters, held.tolist(), strict=True) if count]
        for bucket in _buckets(chosen):
            gradients = [torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in bucket]
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(flat)
            for parameter, part in zip(
                bucket, torch.split(flat, [gradient.numel() for gradient in gradients]), strict=True
            ):
                parameter.grad = part.view_as(parameter)

    def summed(self, scores_KBT: Float32s) -> Float32s:
        """(K, B, T) scores of all rows; each rank passes those that it computed, and 0 elsewhere."""
        tensor = torch.tensor(scores_KBT if self.reports else np.zeros_like(scores_KBT), device=self.device)
        dist.all_reduce(tensor)
        return np.asarray(tensor.cpu().numpy())

    def gather(self, value: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Every rank's value, in rank order; sent as JSON, because pickles are not sent over sockets."""
        own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(self.device)
        sizes = torch.zeros(self.num, dtype=torch.int64, device=self.device)
        sizes[self.rank] = len(own)
        dist.all_reduce(sizes)
        padded = torch.zeros(int(sizes.max()), dtype=torch.uint8, device=self.device)
        padded[: len(own)] = own
        everything = [torch.zeros_like(padded) for _ in range(self.num)]
        dist.all_gather(everything, padded)
        return [
            json.loads(bytes(parameter[:size].cpu().numpy()))
            for parameter, size in zip(everything, sizes.tolist(), strict=True)
        ]

    def instructed(self, value: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The first rank's value on every rank, sent as JSON; the others pass None and wait without their device.

        All ranks must call this. WorkerError on ranks whose first rank has ended.
        """
        with boundary(f"rank {self.rank} of {self.num}: the next instruction of the first", WorkerError):
            if self._idle is None:
                self._idle = dist.new_group(timeout=timedelta(seconds=IDLE_S), backend="gloo")
            sent = bytearray(b"" if value is None else json.dumps(value).encode())
            size = torch.tensor([len(sent)])
            dist.broadcast(size, 0, group=self._idle)
            text = torch.frombuffer(sent, dtype=torch.uint8) if sent else torch.zeros(int(size), dtype=torch.uint8)
            dist.broadcast(text, 0, group=self._idle)
            return dict(json.loads(bytes(text.numpy())))

    def close(self) -> None:
        """Leave the process groups."""
        if dist.is_initialized():
            dist.destroy_process_group()


def by_node(nodes: Sequence[str]) -> list[int]:
    """The ranks grouped by node, with nodes in the order of their first rank."""
    return sorted(range(len(nodes)), key=lambda rank: nodes.index(nodes[rank]))


def ranks_of(context: WorkerContext, context_parallel: int = 1) -> Ranks | None:
    """The ranks of a worker's replica; None for a single rank."""
    if context.num_ranks == 1:
        return None
    ranks = Ranks(context.rank, context.num_ranks, context.rendezvous, torch.device(context.device), context_parallel)
    check_shared(ranks, context.run_dir)
    return ranks


def check_shared(ranks: Ranks, directory: Path, wait_s: float = SEEN_S) -> None:
    """ConfigError on every rank, naming those that cannot see files that rank 0 writes to the directory.

    All ranks write and read checkpoints there. All ranks must call this.
    """
    mark = ""
    if ranks.rank == 0:
        directory.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(prefix=".seen-by-all-ranks-", dir=directory, delete=False) as file:
            mark = Path(file.name).name
    first, *_ = ranks.gather({"mark": mark, "node": os.uname().nodename})
    until = time.monotonic() + wait_s
    while not (seen := (directory / first["mark"]).is_file()) and time.monotonic() < until:
        time.sleep(LOOK_S)  # a network file system may show it later
    found = ranks.gather({"seen": seen, "node": os.uname().nodename})
    if ranks.rank == 0:
        (directory / mark).unlink()
    blind = [f"rank {rank} on node {of['node']}" for rank, of in enumerate(found) if not of["seen"]]
    if blind:
        raise ConfigError(
            f"run directory '{directory}': {' and '.join(blind)} cannot see what rank 0 on node {first['node']} has "
            "written there; needs a file system that all ranks share; set train.dir to a directory on one"
        )


def computed_tokens(batch: Batch, shared_prefix: SharedPrefix) -> Int64s:
    """(B,) tokens that are computed for each row, without padding; shared tokens count for one of the rows."""
    if shared_prefix is SharedPrefix.NONE or not len(batch):
        return batch.lengths_B
    if shared_prefix is SharedPrefix.TREE:
        return tree_tokens(batch)
    prefix_B = shared_prefixes(batch)
    first_G = np.unique(batch.group_B, return_index=True)[1]
    tokens_B = suffix_lengths(batch, prefix_B)
    tokens_B[first_G] += prefix_B[first_G]
    return tokens_B


def shared_tokens(batch: Batch, shared_prefix: SharedPrefix) -> int:
    """Tokens that predictions need but that are not computed again, because another row of the batch shares them."""
    if shared_prefix is SharedPrefix.NONE:
        return 0
    return int(needed_tokens(batch).sum() - computed_tokens(batch, shared_prefix).sum())


def shares(batch: Batch, shared_prefix: SharedPrefix, cost: LayerCost, num: int) -> Int64s:
    """(B,) the rank of each row, balanced by layer cost; groups stay whole if prefixes are shared."""
    groups_B = batch.group_B if shared_prefix is not SharedPrefix.NONE else np.arange(len(batch))
    return balanced(row_costs(batch, shared_prefix, cost), groups_B, num)


def balanced(costs_B: Int64s | Float64s, groups_B: Int64s, num: int) -> Int64s:
    """(B,) the rank of each row: groups, the most costly first, go to the rank with the lowest cost so far.

    Rows of a group stay together. No rank costs more than the cheapest one plus the most costly group.
    """
    groups, index_B = np.unique(groups_B, return_inverse=True)
    costs_G = np.bincount(index_B, costs_B, minlength=len(groups))
    ranks_G = np.zeros(len(groups), dtype=np.int64)
    load = np.zeros(num)
    for group in np.argsort(-costs_G, kind="stable"):
        ranks_G[group] = load.argmin()
        load[ranks_G[group]] += costs_G[group]
    return np.asarray(ranks_G[index_B])


def _buckets(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Consecutive parameters of one type, up to the size of a bucket."""
    bucket: list[Tensor] = []
    size = 0
    for parameter in parameters:
        if bucket and (parameter.dtype != bucket[0].dtype or size >= BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += parameter.numel() * parameter.element_size()
    if bucket:
        yield bucket
