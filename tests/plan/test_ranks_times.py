"""The estimated seconds of ranks that train one model: summed gradients, shards, and copies of shards (HSDP)."""

from dataclasses import replace

import pytest
from gpu_machines import H100, planned

from rlcore.plan.machine_cards import facts_of, machine_of
from rlcore.plan.machine_plan import Lengths, step_layout
from rlcore.plan.machine_times import StepLayout, StepSize, estimate_step

BILLION = 10**9
EIGHT_B = StepSize(8 * BILLION, 32, 4096, 4096, 1024, 64, 32, 160, 900, 3936, 14336, 128256)
NODE, NETWORK, MEMORY = 0.7 * 450 * BILLION, 0.7 * 50 * BILLION, 0.7 * 3350 * BILLION
"""Bytes per second that are reached over an H100's links, between nodes, and in its memory."""
TWO_NODES, ONE_NODE = "2x8xH100-80GB", "8xH100-80GB"


def update_s(layout: StepLayout, machine: str = TWO_NODES, size: StepSize = EIGHT_B) -> float:
    """Seconds that one more update of the same rows takes: what does not depend on the rows."""
    one, two = (estimate_step(size, replace(layout, updates=n), machine_of(machine)).seconds["update"] for n in (1, 2))
    return two - one


@pytest.mark.parametrize(
    ("layout", "machine", "exchange_s", "parts"),
    [
        # 8e9 parameters. Whole gradients of 4 bytes are summed: each rank sends 2 * 15/16 of 32 GB.
        (StepLayout(16), TWO_NODES, 60e9 / NETWORK, 1),
        (StepLayout(8), TWO_NODES, 56e9 / NODE, 1),
        # 16 shards over the network: 15/16 of twice 16 GB of weights, and of 32 GB of gradients.
        (StepLayout(16, sharded=True), TWO_NODES, (30e9 + 30e9) / NETWORK, 16),
        # 8 shards within each node, 7/8 of that; then each sums its 4 GB with the other node's: 2 * 1/2 of them.
        (StepLayout(16, sharded=True, copies=2), TWO_NODES, (28e9 + 28e9) / NODE + 4e9 / NETWORK, 8),
        # 4 shards, 3/4; then each sums its 8 GB with those of three other copies, one of them on its node: 2 * 3/4.
        (StepLayout(16, sharded=True, copies=4), TWO_NODES, (24e9 + 24e9) / NODE + 12e9 / NETWORK, 4),
        # Two copies on one node never use the network.
        (StepLayout(8, sharded=True, copies=2), ONE_NODE, (24e9 + 24e9) / NODE + 8e9 / NODE, 4),
        # A copy over two nodes gathers over the network: 8 of 16 ranks, on nodes of 4.
        (StepLayout(16, sharded=True, copies=2), "4x4xH100-80GB", (28e9 + 28e9) / NETWORK + 4e9 / NETWORK, 8),
        (StepLayout(1), ONE_NODE, 0.0, 1),
    ],
)
def test_an_update_gathers_and_sums_within_a_copy_and_sums_over_copies(
    layout: StepLayout, machine: str, exchange_s: float, parts: int
) -> None:
    optimizer_s = 30 * 8e9 / parts / MEMORY
    assert update_s(layout, machine) == pytest.approx(exchange_s + optimizer_s, rel=1e-9)


def test_float32_weights_are_twice_as_many_bytes_to_gather_and_gradients_are_the_same() -> None:
    half, single = (update_s(StepLayout(8, sharded=True), size=replace(EIGHT_B, bytes_per_weight=n)) for n in (2, 4))
    assert single - half == pytest.approx(28e9 / NODE, rel=1e-9)


def test_offloaded_state_of_a_rank_with_copies_is_a_part_of_its_copy() -> None:
    layout = StepLayout(16, sharded=True, copies=2)
    moved_s = update_s(replace(layout, offload=True)) - update_s(layout)
    assert moved_s == pytest.approx(24 * 1e9 / 25e9, rel=1e-9)


def test_the_estimate_of_a_plan_has_its_copies() -> None:
    facts = replace(facts_of(machine_of(ONE_NODE)), parameters=H100.parameters, shape=H100.shape)
    sharded = ("rollout.backend=hf", "actor.data_parallel=8", "actor.sharding=fsdp2")
    layouts = [
        step_layout(planned(*settings, facts=facts), Lengths())
        for settings in (sharded, (*sharded, "actor.dp_replicate=2"), sharded[:2])
    ]
    assert [(layout.sharded, layout.copies) for layout in layouts] == [(True, 1), (True, 2), (False, 1)]


@pytest.mark.parametrize(
    ("layout", "copied", "read"),
    [
        (StepLayout(), 1.0, 1.0),
        (StepLayout(2), 0.5, 1.0),
        (StepLayout(8, tensor_parallel=4), 1 / 8, 1 / 4),
        # Of a layer, the largest tensors are the products with the inner size; then follow embedding and head.
        (StepLayout(8, sharded=True), (32 * 14336 + 128256) / (32 * 53248 + 2 * 128256), 1.0),
        (StepLayout(2, sharded=True, tensor_parallel=8), (32 * 28672 + 128256) / (32 * 53248 + 2 * 128256), 1 / 8),
        (StepLayout(8, sharded=True, merges=True), 1.0, 1.0),
    ],
)
def test_weights_in_shared_memory_take_the_largest_share_of_a_rank_and_the_part_of_a_device(
    layout: StepLayout, copied: float, read: float
) -> None:
    found = estimate_step(EIGHT_B, replace(layout, weight_sync="shm"), machine_of(ONE_NODE)).seconds["hand-over"]
    assert found == pytest.approx((copied + read) * 2 * EIGHT_B.parameters / 8e9, rel=0.01)
