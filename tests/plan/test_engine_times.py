"""The estimated seconds of engines with several devices, and without CUDA graphs."""

from dataclasses import replace

import pytest

from rlcore.plan.machine_cards import CARDS, Card, Machine
from rlcore.plan.machine_times import (
    COLLECTIVE_S,
    EAGER_LAYER_S,
    NODES_COLLECTIVE_S,
    StepLayout,
    StepSize,
    estimate_step,
)

LAYERS, HIDDEN = 32, 4096
LLAMA_8B = StepSize(8_030_261_248, LAYERS, HIDDEN, 4096, 1024, 64, 32, 160, 900, 3936, 14336, 128256)
H100 = CARDS["H100-80GB"]
WAVES, ROWS = 64 * 32 / 64 - 1, 64
ONE, FOUR = StepLayout(cached_rows=ROWS), StepLayout(cached_rows=ROWS, tensor_parallel=4)


def sampling(layout: StepLayout, card: Card = H100) -> float:
    return estimate_step(LLAMA_8B, layout, Machine(1, 4, card)).seconds["sample"]


def test_the_devices_of_an_engine_add_up_their_values_over_the_links_twice_per_layer() -> None:
    instant = sampling(FOUR, replace(H100, link_gb_s=1e12))
    passes = 1 + WAVES * 900 + 3936
    tokens = 64 * 160 + WAVES * 900 * ROWS + 3936 * ROWS * 900 / 3936
    sums = 2 * LAYERS * tokens * 2 * 3 / 4 * 2 * HIDDEN / (0.7 * 450e9)
    assert sampling(FOUR) - instant == pytest.approx(sums, rel=1e-6)
    further = sampling(replace(FOUR, tensor_parallel=8), replace(H100, link_gb_s=1e12))
    assert instant > 2 * LAYERS * passes * COLLECTIVE_S
    assert further > instant / 2 + LAYERS * passes * COLLECTIVE_S, "latency does not shrink with more devices"
    assert sampling(FOUR, replace(H100, link_gb_s=32.0)) - instant == pytest.approx(sums * 450 / 32, rel=1e-6)
    assert sampling(ONE) == sampling(ONE, replace(H100, link_gb_s=1.0)), "one device adds up nothing"


def test_over_nodes_the_sums_of_an_engine_go_through_the_ports_of_its_devices() -> None:
    """Two devices on each of two nodes have 100 GB/s, and more than the links of a card they never have."""
    over_two, passes = replace(FOUR, engine_nodes=2), 1 + WAVES * 900 + 3936
    latency = 2 * LAYERS * passes * (NODES_COLLECTIVE_S - COLLECTIVE_S)
    instant = sampling(FOUR, replace(H100, link_gb_s=1e12))
    on_one = sampling(FOUR) - instant
    assert sampling(over_two) - instant == pytest.approx(latency + on_one * 450 / 100, rel=1e-3)
    slow = replace(H100, link_gb_s=32.0)
    assert sampling(over_two, slow) - sampling(FOUR, slow) == pytest.approx(latency, rel=1e-3)


def test_an_engine_without_cuda_graphs_launches_each_kernel_in_every_decoding_step() -> None:
    eager = sampling(replace(ONE, graphs=False)) - sampling(ONE)
    assert eager == pytest.approx((WAVES * 900 + 3936) * LAYERS * EAGER_LAYER_S)
    embedded = replace(ONE, embedded=True)
    assert sampling(embedded) == sampling(replace(embedded, graphs=False)), "its launches are counted already"
