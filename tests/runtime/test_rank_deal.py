"""Requests are dealt to the ranks of a replica, and conversations stay on theirs."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.config import ModelConfig
from rlcore.contracts import dispatch
from rlcore.data.tokenizer import ByteTokens
from rlcore.engines.hf.sample.kv_cache import PromptPass
from rlcore.engines.hf.sample.sampler import EmbeddedSampler
from rlcore.engines.hf.train.model import ModelKind, PolicyModel, load_model
from rlcore.runtime import rank_deal
from rlcore.runtime.rank_deal import RankDeal
from rlcore.runtime.rollout_service import RolloutService
from rlcore.testing.tiny import write_tiny_model
from rlcore.types import Completion, GenerateRequest, Lane, Sampling


def request(name: str, conversation: str = "") -> GenerateRequest:
    return GenerateRequest(name, (1, 2), Sampling(), 1, 0, conversation=conversation)


def ranks_of(deal: RankDeal, *requests: GenerateRequest, num_ranks: int = 3) -> list[int]:
    return [dealt.rank % num_ranks for dealt in deal.deal(requests)]


def test_a_call_is_dealt_evenly_and_single_requests_use_all_ranks() -> None:
    found = ranks_of(RankDeal(), *(request(f"p{index:02}") for index in range(12)))
    assert [found.count(rank) for rank in range(3)] == [4, 4, 4]
    assert {ranks_of(RankDeal(), request(f"p{index}"))[0] for index in range(20)} == {0, 1, 2}


@pytest.mark.parametrize(("num_samples", "num_ranks"), [(4, 2), (6, 3), (3, 2)])
def test_groups_whose_samples_are_requested_one_by_one_are_dealt_evenly(num_samples: int, num_ranks: int) -> None:
    names = [f"p{index}" for index in range(4 * num_ranks)]
    requests = [request(f"{name}/{sample}", name) for name in names for sample in range(num_samples)]
    found = ranks_of(RankDeal(), *requests, num_ranks=num_ranks)
    assert [found.count(rank) for rank in range(num_ranks)] == [4 * num_samples] * num_ranks
    assert found == [rank for rank in found[::num_samples] for _ in range(num_samples)], "a group has one rank"


def test_the_turns_of_a_conversation_stay_on_its_rank_whatever_is_requested_with_them() -> None:
    deal, names = RankDeal(), [f"p{index}" for index in range(7)]
    first = dict(zip(names, ranks_of(deal, *(request(name, name) for name in names)), strict=True))
    for turn in range(1, 9):
        some = [names[(turn * 3 + place) % 7] for place in range(turn % 4 + 1)]
        found = ranks_of(deal, *(request(f"{name}/0/{turn}", name) for name in some))
        assert found == [first[name] for name in some]


def test_ranks_do_not_depend_on_the_order_of_calls() -> None:
    calls = [[request(f"{letter}{index}", f"{letter}{index}") for index in range(3)] for letter in "abc"]
    one, other = RankDeal(), RankDeal()
    forward = [ranks_of(one, *call) for call in calls]
    backward = [ranks_of(other, *call) for call in reversed(calls)]
    assert forward == backward[::-1]


def test_the_oldest_conversations_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rank_deal.REMEMBERED_HOMES == dispatch.REMEMBERED_HOMES
    monkeypatch.setattr(rank_deal, "REMEMBERED_HOMES", 2)
    deal = RankDeal()
    for name in ("a", "b", "a", "c"):
        deal.deal([request(name, name)])
    assert list(deal._ranks) == ["a", "c"]


class Ranks:
    """A replica with an embedded rollout in each of two ranks, which count the tokens that they compute."""

    name, alive = "rollout[0]", True

    def __init__(self, model: PolicyModel, num_ranks: int) -> None:
        self.num_computed = [0] * num_ranks
        self.samplers = [self.sampler(model, rank) for rank in range(num_ranks)]

    def sampler(self, model: PolicyModel, rank: int) -> EmbeddedSampler:
        found = EmbeddedSampler(model, ByteTokens(), max_rows=8, device=torch.device("cpu"), cached_tokens=10_000)
        compute = found._decoder._pass

        def counted(now: Any, token_ids_NT: Any) -> Any:
            if isinstance(now, PromptPass) or now.tokens > 1:
                self.num_computed[rank] += token_ids_NT.numel()
            return compute(now, token_ids_NT)

        found._decoder._pass = counted  # type: ignore[method-assign]
        return found

    async def stream(
        self, method: Callable[..., Any], requests: Sequence[GenerateRequest]
    ) -> AsyncGenerator[Completion, None]:
        for rank, sampler in enumerate(self.samplers):
            if mine := [request for request in requests if request.rank % len(self.samplers) == rank]:
                async with aclosing(sampler.generate(mine)) as completions:  # type: ignore[type-var]
                    async for completion in completions:
                        yield completion


class Group:
    def __init__(self, replica: Ranks) -> None:
        self.replicas = [replica]

    def on_event(self, callback: Any) -> None: ...


async def conversations(service: RolloutService) -> AsyncIterator[Completion]:
    """Three groups of two conversations with three turns each; the later turns are requested one by one."""
    prompts = {f"g{index}": tuple(range(40 + index, 70 + 2 * index)) for index in range(3)}
    first = [
        GenerateRequest(name, ids, Sampling(max_tokens=6), 2, index, conversation=name)
        for index, (name, ids) in enumerate(prompts.items())
    ]
    texts: dict[tuple[str, int], tuple[int, ...]] = {}
    async for completion in service.generate(first, Lane.TRAIN):
        name = completion.request_id
        texts[name, completion.sample] = (*prompts[name], *completion.token_ids.tolist(), 9, 9)
        yield completion
    for turn in (1, 2):
        for name, sample in sorted(texts):
            later = GenerateRequest(
                f"{name}/{sample}/{turn}", texts[name, sample], Sampling(max_tokens=6), 1, turn, conversation=name
            )
            async for completion in service.generate([later], Lane.TRAIN):
                texts[name, sample] += (*completion.token_ids.tolist(), 9, 9)
                yield completion


@pytest.mark.slow
def test_ranks_compute_no_more_for_conversations_than_one_process(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path, num_key_value_heads=2)
    model = load_model(ModelKind.CAUSAL_LM, ModelConfig(path=str(path)), dtype="float64", device="cpu")
    assert isinstance(model, PolicyModel)

    async def story(num_ranks: int) -> tuple[Ranks, dict[tuple[str, int], list[int]]]:
        replica = Ranks(model, num_ranks)
        service = RolloutService(Group(replica), 60.0, ranks=num_ranks)  # type: ignore[arg-type]
        found = [completion async for completion in conversations(service)]
        return replica, {(row.request_id, row.sample): row.token_ids.tolist() for row in found}

    one, expected = asyncio.run(story(1))
    two, found = asyncio.run(story(2))
    assert found == expected
    assert all(two.num_computed), "both ranks sample"
    assert sum(two.num_computed) <= sum(one.num_computed)
