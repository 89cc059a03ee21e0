"""Prompts with a common beginning on the embedded rollout: it is computed once, and the samples are the same."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlcore.config import ModelConfig
from rlcore.data.tokenizer import ByteTokens
from rlcore.engines.hf.sample import prompt_passes
from rlcore.engines.hf.sample.decode import SHARED_TOKENS
from rlcore.engines.hf.sample.decode_row import DecodeGroup
from rlcore.engines.hf.sample.kv_cache import PromptPass, RowPass
from rlcore.engines.hf.sample.prompt_passes import common_beginning
from rlcore.engines.hf.sample.sampler import EmbeddedSampler
from rlcore.engines.hf.train.model import ModelKind, PolicyModel, load_model
from rlcore.testing.tiny import write_tiny_model
from rlcore.types import Completion, GenerateRequest, Sampling

torch.set_num_threads(1)  # the models are tiny, and the tests may share their cores

SYSTEM = tuple(range(40, 120))
CASES = [
    ("Llama", "sdpa", {"num_key_value_heads": 2}),
    ("Mistral", "eager", {"num_key_value_heads": 2, "sliding_window": 8}),
    ("Mistral", "sdpa", {"num_key_value_heads": 2, "sliding_window": 90}),
    (
        "DeepseekV3",
        "sdpa",
        {
            **{"num_key_value_heads": 4, "kv_lora_rank": 24, "q_lora_rank": 20, "qk_nope_head_dim": 16},
            **{"qk_rope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2},
            **{"moe_intermediate_size": 16, "n_group": 1, "topk_group": 1},
        },
    ),
    ("GPTJ", "eager", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "rotary_dim": 8}),
]


def model_of(path: Path, attention: Any = "sdpa") -> PolicyModel:
    config = ModelConfig(path=str(path), attention=attention)
    model = load_model(ModelKind.CAUSAL_LM, config, dtype="float64", device="cpu")
    assert isinstance(model, PolicyModel)
    return model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PolicyModel:
    return model_of(write_tiny_model(tmp_path_factory.mktemp("models") / "llama", num_key_value_heads=2))


class Counted(EmbeddedSampler):
    """A sampler that notes the passes over prompts: how many, the tokens of each, and those that were there."""

    def __init__(
        self, model: PolicyModel, max_rows: int = 8, *, shares: bool = True, keeps_cache: bool = False
    ) -> None:
        super().__init__(model, ByteTokens(), max_rows=max_rows, device=torch.device("cpu"), keeps_cache=keeps_cache)
        assert self._decoder.least_shared == SHARED_TOKENS
        if not shares:
            self._decoder.least_shared = None
        self.passes, compute = list[tuple[int, int, int]](), self._decoder._pass

        def counted(now: PromptPass | RowPass, token_ids_NT: Any) -> Any:
            if isinstance(now, PromptPass):
                self.passes.append((*token_ids_NT.shape, now.done))
            return compute(now, token_ids_NT)

        self._decoder._pass = counted  # type: ignore[method-assign]


def requests_of(texts: Sequence[Sequence[int]], n: int = 2, max_tokens: int = 9) -> list[GenerateRequest]:
    return [
        GenerateRequest(f"r{index}", tuple(ids), Sampling(max_tokens=max_tokens + index), n, seed=index)
        for index, ids in enumerate(texts)
    ]


def sampled(sampler: EmbeddedSampler, requests: Sequence[GenerateRequest]) -> list[Completion]:
    async def completions() -> list[Completion]:
        return [completion async for completion in sampler.generate(requests)]

    return sorted(asyncio.run(completions()), key=lambda completion: (completion.request_id, completion.sample))


def assert_equal(found: Sequence[Completion], expected: Sequence[Completion]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        assert np.abs(ours.logprobs - theirs.logprobs).max() < 1e-5


PROMPTS = [(*SYSTEM, *range(5 + 7 * index, 9 + 11 * index)) for index in range(5)]


@pytest.mark.slow
@pytest.mark.parametrize("max_rows", [10, 3])
@pytest.mark.parametrize(("architecture", "attention", "settings"), CASES)
def test_samples_are_those_of_prompts_that_are_computed_whole(
    tmp_path: Path, architecture: str, attention: Any, settings: dict[str, Any], max_rows: int
) -> None:
    model = model_of(write_tiny_model(tmp_path, architecture, **settings), attention)
    sharing, plain = Counted(model, max_rows), Counted(model, max_rows, shares=False)
    assert_equal(sampled(sharing, requests_of(PROMPTS)), sampled(plain, requests_of(PROMPTS)))
    whole = sum(rows for rows, _, done in sharing.passes if not done)
    assert (whole, sum(rows for rows, *_ in sharing.passes)) == (1, 5)
    assert {done for *_, done in plain.passes} == {0}


def test_the_longest_common_beginning_is_computed_once(model: PolicyModel) -> None:
    sampler = Counted(model, 10)
    sampled(sampler, requests_of([[*SYSTEM, 5], [*SYSTEM, 6, 7, 8], [*SYSTEM, 6, 9]]))
    assert sampler.passes == [(1, len(SYSTEM) + 1, 0), (2, 3, len(SYSTEM))]


def test_a_prompt_that_joins_later_shares_with_those_that_are_there(model: PolicyModel) -> None:
    """The last one has the most tokens in common with the second, of which a sample is still decoded."""
    sampler = Counted(model, 4)
    sampled(sampler, requests_of([[*SYSTEM, 5], [*SYSTEM, 6, 7, 8, 9], [*SYSTEM, 6, 7, 8, 4]], max_tokens=5))
    assert sampler.passes == [(1, len(SYSTEM) + 1, 0), (1, 4, len(SYSTEM)), (1, 1, len(SYSTEM) + 3)]


def test_prompts_share_what_saves_most(model: PolicyModel) -> None:
    """The live prompt and the others have one beginning, and the others a longer one."""
    task = tuple(range(30, 130))
    sampler = Counted(model, 4)
    later = [(*SYSTEM, *task, last) for last in (5, 6, 7)]

    async def story() -> None:
        async def completions(requests: Sequence[GenerateRequest]) -> None:
            async for _ in sampler.generate(requests):
                pass

        first = asyncio.create_task(completions(requests_of([[*SYSTEM, 5]], n=1, max_tokens=30)))
        for _ in range(3):
            await asyncio.sleep(0)
        await completions(requests_of(later, n=1, max_tokens=5))
        await first

    asyncio.run(story())
    longer = len(SYSTEM) + len(task)
    assert sampler.passes == [(1, len(SYSTEM) + 1, 0), (1, len(task) + 1, len(SYSTEM)), (2, 1, longer)]


def test_each_beginning_is_computed_once_and_other_prompts_together(model: PolicyModel) -> None:
    other = tuple(range(150, 250))
    sampler = Counted(model, 10)
    texts = [(*SYSTEM, 5), (*other, 6), (7, 8, 9), (*SYSTEM, 5, 6), (*other, 8, 9), SYSTEM[:64], (3, 4)]
    found = sampled(sampler, requests_of(texts, n=1))
    assert_equal(found, sampled(Counted(model, 10, shares=False), requests_of(texts, n=1)))
    assert sampler.passes == [
        (3, 64, 0),
        *((1, len(SYSTEM) + 1, 0), (1, 1, len(SYSTEM) + 1)),
        *((1, len(other) + 1, 0), (1, 2, len(other))),
    ]


def test_short_beginnings_are_not_shared(model: PolicyModel) -> None:
    sampler = Counted(model, 10)
    sampled(sampler, requests_of([(*SYSTEM[:63], *[last] * 20) for last in (5, 6, 7)]))
    assert sampler.passes == [(3, 83, 0)]


def test_prompts_that_need_a_large_mask_are_computed_whole(model: PolicyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_passes, "MOST_LEFT", 3)
    for left, shared in ((3, len(SYSTEM)), (4, 0)):
        sampler = Counted(model, 10)
        sampled(sampler, requests_of([(*SYSTEM, *[last] * left) for last in range(3)]))
        assert sampler.passes[-1][2] == shared


def test_passes_are_bounded_with_the_tokens_that_are_there(model: PolicyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_passes, "PASS_TOKENS", 200)
    sampler = Counted(model, 10)
    sampled(sampler, requests_of([(*SYSTEM, last) for last in range(5)]))
    assert sampler.passes == [(1, len(SYSTEM) + 1, 0), *[(2, 1, len(SYSTEM))] * 2]


def test_prompts_share_with_none_that_older_weights_computed(model: PolicyModel) -> None:
    """Rows that are decoded keep their cache over new weights; a prompt that joins them is computed by the new ones."""

    async def story(keeps_cache: bool) -> list[tuple[int, int, int]]:
        sampler = Counted(model, 4, keeps_cache=keeps_cache)
        long, short = (requests_of([[*SYSTEM, last]], max_tokens=size) for last, size in ((5, 40), (6, 5)))

        async def completions(requests: Sequence[GenerateRequest]) -> int:
            return len([completion async for completion in sampler.generate(requests)])

        first = asyncio.create_task(completions(long))
        for _ in range(5):
            await asyncio.sleep(0)
        sampler.weights_changed()
        sampler.passes.clear()
        assert await completions(short) == 2
        await first
        return sampler.passes

    whole = (1, len(SYSTEM) + 1, 0)
    assert asyncio.run(story(True)) == [whole]
    assert asyncio.run(story(False)) == [whole, (1, 1, len(SYSTEM))], "the live prompt is computed again, and shared"


@pytest.mark.parametrize("fault", ["wrong", "raises"])
def test_a_model_that_cannot_continue_a_prompt_computes_each_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    model = model_of(write_tiny_model(tmp_path, "Llama", num_key_value_heads=2))
    forward = model.transformer.base_model.forward

    def odd(*arguments: Any, **settings: Any) -> Any:
        cache = settings.get("past_key_values")
        if isinstance(now := getattr(cache, "now", None), PromptPass) and now.done:
            if fault == "raises":
                raise ValueError("no cache in a first pass")
            settings["input_ids"] = settings["input_ids"].flip(1)
        return forward(*arguments, **settings)

    monkeypatch.setattr(model.transformer.base_model, "forward", odd)
    sampler = EmbeddedSampler(model, ByteTokens(), max_rows=8, device=torch.device("cpu"))
    assert sampler._decoder.least_shared is None
    assert len(sampled(sampler, requests_of(PROMPTS))) == 10


def test_common_beginnings() -> None:
    def group(*ids: int) -> DecodeGroup:
        return DecodeGroup(ids, 1)

    one, two = group(1, 2, 3, 4), group(1, 2, 9)
    assert common_beginning([group(1, 2, 3, 5)], [two, one], 1) == (one, 3)
    assert common_beginning([group(1, 2, 3, 5), group(1, 2, 7)], [two, one], 1) == (two, 2)
    assert common_beginning([group(1, 2, 3, 4)], [one], 1) == (one, 3), "a token is left to compute"
    assert common_beginning([group(1, 2, 3, 5)], [one], 4) is None
    assert common_beginning([group(1, 2, 5, 6, 7)], [one], 3) is None
    assert common_beginning([group(1, 2, 3, 5)], [], 1) is None
    assert common_beginning([], [one], 1) is None
