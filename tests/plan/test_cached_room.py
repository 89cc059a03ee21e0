"""Tokens that an embedded rollout may cache: those of its rows, and others in memory that only updates need."""

from dataclasses import replace
from pathlib import Path

import pytest
from gpu_machines import planned
from test_plan_memory import LLAMA, plan

from rlcore.engines.hf.resources import complete_embedded
from rlcore.plan import Facts, RunPlan
from rlcore.plan.memory import memory_estimate
from rlcore.plan.memory_limits import memory_plans

EMBEDDED = (
    "data.max_prompt_tokens=100", "rollout.max_tokens=60", "train.prompts_per_step=64", "rollout.samples_per_prompt=2",
    "rollout.max_rows=80", "actor.dtype=float32", "actor.backend=hf", "rollout.backend=hf", "actor.shared_prefix=none",
)  # fmt: skip
SMALL = Facts(parameters=10**4, shape=LLAMA)


def room(found: RunPlan) -> tuple[int, int]:
    """(tokens planned for rows, tokens that may be cached)."""
    (worker,) = (worker for worker in found.workers if worker.request.role.name == "rollout")
    plans = memory_plans(found.config, found.workers, found.memory_bytes, found.facts)
    return worker.request.cached_tokens, plans["rollout"].cached_tokens


def estimate_with(found: RunPlan, cached_tokens: int) -> int:
    """The actor's estimate if its rollout caches that many tokens."""
    workers = [
        replace(worker, request=replace(worker.request, cached_tokens=cached_tokens))
        if worker.request.role.name == "rollout"
        else worker
        for worker in found.workers
    ]
    return memory_estimate(found.config, workers, found.facts)["actor"]


def test_the_room_is_what_an_update_needs_more_than_generation_and_no_byte_more() -> None:
    found = plan(*EMBEDDED, "actor.micro_batch_tokens=200000", facts=SMALL)
    tokens, most = room(found)
    assert tokens == 80 * 60 + 41 * 100
    assert most > 2 * tokens
    assert estimate_with(found, most) == found.memory_bytes["actor"] < estimate_with(found, most + 1)


def test_without_more_need_of_an_update_the_room_is_that_of_the_rows() -> None:
    tokens, most = room(plan(*EMBEDDED, "actor.micro_batch_tokens=320", facts=SMALL))
    assert most == tokens


def test_there_is_no_room_where_the_architecture_is_not_known() -> None:
    assert room(plan(*EMBEDDED, facts=replace(SMALL, shape=None)))[1] == 0


def test_on_a_device_with_other_processes_the_room_is_that_of_the_rows() -> None:
    embedded = ("rollout.backend=hf", "rollout.max_rows=16", "rollout.max_tokens=128")
    alone_tokens, alone = room(planned(*embedded))
    assert alone > alone_tokens
    shared = planned(*embedded, "algo.kl.placement=loss", "cluster.layout=colocated")
    assert {worker.request.pool for worker in shared.workers if worker.request.embedded_in is None} == {"main"}
    tokens, most = room(shared)
    assert most == tokens


@pytest.mark.parametrize(("agent", "tokens"), [("single_turn", 80 * 60 + 41 * 100), ("many_turns", 80 * (60 + 100))])
def test_rows_of_agents_with_further_turns_share_no_prompts(agent: str, tokens: int, tmp_path: Path) -> None:
    found = plan(*EMBEDDED, facts=SMALL)
    (worker,) = (worker for worker in found.workers if worker.request.role.name == "rollout")
    config = replace(found.config, rollout=replace(found.config.rollout, agent=agent))
    assert complete_embedded(config, None, worker.request).cached_tokens == tokens
