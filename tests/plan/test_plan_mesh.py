"""Copies of sharded weights over nodes, in the plan."""

import re
from dataclasses import replace
from typing import Any

import pytest
from gpu_machines import GIB, H100, SETTINGS, machine

from rlcore.config.choices import Choice
from rlcore.contracts.requests import ModelShape
from rlcore.errors import PlanError
from rlcore.plan import Facts, RunPlan, make_plan, plan_to_json
from rlcore.plan.memory import training_bytes_per_parameter
from rlcore.plugins import configure

pytest.importorskip("ray")

LARGE = ModelShape("qwen2", 48, 5120, 13824, 1024, 152064, full_attention=True, heads=40)
FACTS = replace(machine(8), parameters=14_770_000_000, shape=LARGE)
NODES = (
    "plugins.ray.address=auto",
    "actor.backend=hf",
    "rollout.backend=hf",
    "actor.sharding=fsdp2",
    "train.prompts_per_step=64",
)


def on_nodes(nodes: int, ranks: int, *overrides: str, facts: Facts = FACTS) -> RunPlan:
    settings = [*SETTINGS, *NODES, f"cluster.pools.main.nodes={nodes}", f"actor.data_parallel={ranks}", *overrides]
    hooks, loaded = configure([], settings, ["ray"], machine=facts)
    return make_plan(loaded, hooks, facts)


def choice_of(plan: RunPlan) -> Choice | None:
    return next((choice for choice in plan.choices if choice.key == "actor.dp_replicate"), None)


def chosen(*arguments: Any, **facts: Any) -> Choice:
    found = choice_of(on_nodes(*arguments, **facts))
    assert found is not None
    return found


@pytest.mark.slow
def test_each_node_holds_a_copy_where_one_fits() -> None:
    found = chosen(2, 32)
    assert (found.value, found.reason.partition(":")[0]) == (2, "each node holds a copy of the weights")
    made = on_nodes(2, 32)
    assert plan_to_json(made)["workers"]["actor"]["dp_replicate"] == 2
    flat = on_nodes(2, 32, "actor.dp_replicate=1")
    assert choice_of(flat) == Choice("actor.dp_replicate", 1, "", "override 'actor.dp_replicate=1'")
    assert made.memory_bytes["actor"] > flat.memory_bytes["actor"], "a rank keeps a sixteenth, and not half of that"
    for engine, parts in ((made.config.actor, 16), (flat.config.actor, 32)):
        assert training_bytes_per_parameter(engine) == 20 / parts


@pytest.mark.parametrize(
    ("nodes", "ranks", "overrides", "facts", "reason"),
    [
        (2, 16, (), replace(FACTS, gpu_free_bytes=45 * GIB), r"a copy for each of 2 nodes needs .* all 16 ranks share"),
        (3, 16, (), FACTS, r"16 ranks on 3 nodes do not give each node a copy of several ranks"),
        (8, 8, (), FACTS, r"8 ranks on 8 nodes do not give"),
        (2, 12, ("actor.context_parallel=4",), FACTS, r"12 ranks on 2 nodes with 4 slices do not give"),
        (2, 16, (), replace(FACTS, parameters=None), r"whether a node can hold a copy is unknown"),
        (
            2,
            16,
            (),
            replace(FACTS, gpu_memory_bytes=None, gpu_free_bytes=None),
            r"whether a node can hold a copy is unknown",
        ),
    ],
    ids=["no room", "not divided", "one each", "slices", "unknown model", "unknown device"],
)
def test_all_ranks_share_out_one_copy_elsewhere(
    nodes: int, ranks: int, overrides: tuple[str, ...], facts: Facts, reason: str
) -> None:
    found = chosen(nodes, ranks, *overrides, facts=facts)
    assert found.value == 1
    assert re.search(reason, found.reason), found.reason


def test_one_node_and_ranks_that_share_nothing_out_are_not_spoken_of() -> None:
    assert choice_of(on_nodes(1, 8)) is None
    assert choice_of(on_nodes(2, 16, "actor.sharding=none", facts=H100)) is None


@pytest.mark.parametrize(
    ("nodes", "ranks", "copies", "overrides", "message"),
    [
        (1, 8, 3, (), r"actor\.dp_replicate=3: actor\.data_parallel=8; needs a number that divides it"),
        (1, 8, 8, (), r"actor\.dp_replicate=8: actor\.data_parallel=8; needs .* leaves each copy several ranks, or "),
        (1, 8, 16, (), r"actor\.dp_replicate=16: actor\.data_parallel=8; needs a number that divides it"),
        (1, 8, 4, ("actor.context_parallel=4",), r"a copy has 2 ranks, and actor\.context_parallel=4 ranks hold"),
        (2, 12, 4, (), ""),
        (3, 12, 2, (), r"a copy has 6 ranks and a node 4, .* needs actor\.dp_replicate=3, a copy for each node, or "),
    ],
    ids=["not divided", "one rank", "more than ranks", "slices", "two for a node", "across nodes"],
)
def test_copies_that_cannot_be_are_refused_in_one_line(
    nodes: int, ranks: int, copies: int, overrides: tuple[str, ...], message: str
) -> None:
    settings = (f"actor.dp_replicate={copies}", *overrides)
    if not message:
        assert on_nodes(nodes, ranks, *settings).config.actor.dp_replicate == copies
        return
    with pytest.raises(PlanError, match=rf"^role 'actor': .*{message}") as found:
        on_nodes(nodes, ranks, *settings)
    assert "\n" not in str(found.value)
