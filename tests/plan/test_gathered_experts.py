"""The largest layer that a rank gathers, in models whose layers differ: some have experts, some have none."""

from dataclasses import replace

import pytest

from rlcore.config import EngineConfig
from rlcore.contracts.requests import Experts, ModelFacts, ModelShape
from rlcore.plan.gathered import gathered_bytes, largest_unit

TABLES, ATTENTION, DENSE, SHARED, ROUTED = 2 * 100 * 10, 400, 3 * 10 * 50, 3 * 10 * 4, 8 * 3 * 10 * 20
SHAPE = ModelShape("llama4_text", 4, 10, 50, 10, 100, full_attention=True)
MIXED = replace(SHAPE, experts=Experts(number=8, per_token=1, inner_size=20, layers=2, shared_size=4))
PARAMETERS = TABLES + 4 * ATTENTION + 2 * DENSE + 2 * (SHARED + ROUTED)
HALF = EngineConfig(dtype="bfloat16", sharding="fsdp2", data_parallel=2)


@pytest.mark.parametrize(("backward", "layers"), [(False, 2), (True, 4)])
def test_a_layer_with_experts_is_larger_than_the_mean(backward: bool, layers: int) -> None:
    found = gathered_bytes(HALF, ModelFacts(PARAMETERS, MIXED), backward=backward)
    assert found == 2 * (2 * TABLES + layers * (ATTENTION + SHARED + ROUTED))


def test_the_largest_unit_is_a_layer_with_experts_or_a_dense_one() -> None:
    assert largest_unit(HALF, ModelFacts(PARAMETERS, MIXED)) == 2 * (ATTENTION + SHARED + ROUTED)
    wide = replace(MIXED, inner_size=500)
    parameters = PARAMETERS + 2 * 9 * DENSE
    assert largest_unit(HALF, ModelFacts(parameters, wide)) == 2 * (ATTENTION + 10 * DENSE)


@pytest.mark.parametrize(
    ("parameters", "shape"),
    [
        (PARAMETERS, replace(MIXED, experts=None)),
        # Weights of 4 bits: files have fewer numbers than the model.
        (ROUTED, MIXED),
        (TABLES + 2 * ROUTED + 10, MIXED),
    ],
)
def test_other_models_have_layers_of_one_size(parameters: int, shape: ModelShape) -> None:
    facts = ModelFacts(parameters, shape)
    outside = min(TABLES, parameters)
    assert gathered_bytes(HALF, facts, backward=False) == 2 * (2 * outside + 2 * ((parameters - outside) // 4))


def test_layers_that_all_have_experts_share_the_parameters_equally() -> None:
    every = replace(MIXED, experts=Experts(number=8, per_token=1, inner_size=20, layers=4, shared_size=4))
    parameters = TABLES + 4 * (ATTENTION + SHARED + ROUTED)
    assert largest_unit(HALF, ModelFacts(parameters, every)) == 2 * (parameters - TABLES) // 4
