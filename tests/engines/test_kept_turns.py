"""Turns of a conversation on the embedded rollout: each computes what is new, and samples as if it computed all."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from counted_sampler import ENOUGH, Counted, conversations, model_of, requests_of, sampled

from rlcore.engines.hf.sample import prompt_passes
from rlcore.engines.hf.sample.kv_cache import RowPass
from rlcore.engines.hf.sample.sampler import EmbeddedSampler
from rlcore.engines.hf.train.model import PolicyModel
from rlcore.testing.tiny import write_tiny_model
from rlcore.types import Completion, GenerateRequest, Sampling

torch.set_num_threads(1)  # the models are tiny, and the tests may share their cores


CASES = [
    ("Llama", "sdpa", "float64", {"num_key_value_heads": 2}),
    pytest.param(
        "Mistral", "eager", "float64", {"num_key_value_heads": 2, "sliding_window": 8}, marks=pytest.mark.slow
    ),
    pytest.param(
        "DeepseekV3",
        "sdpa",
        "float64",
        {
            **{"num_key_value_heads": 4, "kv_lora_rank": 24, "q_lora_rank": 20, "qk_nope_head_dim": 16},
            **{"qk_rope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2},
            **{"moe_intermediate_size": 16, "n_group": 1, "topk_group": 1},
        },
        marks=pytest.mark.slow,
    ),
    pytest.param(
        "GPTJ",
        "eager",
        "float64",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "rotary_dim": 8},
        marks=pytest.mark.slow,
    ),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PolicyModel:
    return model_of(write_tiny_model(tmp_path_factory.mktemp("models") / "llama", num_key_value_heads=2))


@pytest.mark.parametrize(("architecture", "attention", "dtype", "settings"), CASES)
def test_turns_are_those_of_a_sampler_that_computes_everything_again(
    tmp_path: Path, architecture: str, attention: Any, dtype: str, settings: dict[str, Any]
) -> None:
    model = model_of(write_tiny_model(tmp_path, architecture, **settings), dtype, attention)
    keeping, plain = Counted(model, ENOUGH), Counted(model, 0)
    found, expected = asyncio.run(conversations(keeping)), asyncio.run(conversations(plain))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        assert np.abs(ours.logprobs - theirs.logprobs).max() < 1e-5
        assert ours.versions == theirs.versions
    assert (len(keeping.prompts), len(keeping.turns)) == (2, 3 * 4), "prompts once, and four conversations turn by turn"
    assert (len(plain.prompts), plain.turns) == (2 + 3 * 4, [])


async def conversation(sampler: EmbeddedSampler, index: int, num_turns: int = 5) -> list[Completion]:
    """A conversation at its own pace: further turns wait a while, and tools' answers have different lengths."""
    ids, found = [*range(30 + index, 40 + 2 * index)], list[Completion]()
    for turn in range(num_turns):
        request = GenerateRequest(
            f"g{index}/{turn}",
            tuple(ids),
            Sampling(max_tokens=5 + 3 * index),
            1,
            7 * index + turn,
            conversation=f"{index}",
        )
        found += [completion async for completion in sampler.generate([request])]
        ids += [*found[-1].token_ids.tolist(), *range(70, 71 + (5 * index + 3 * turn) % 11)]
        for _ in range((3 * index + turn) % 7):
            await asyncio.sleep(0)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "keeps_cache", "cached_tokens"),
    [((), False, 700), ((25, 40, 41, 90), False, ENOUGH), ((25, 40, 41, 90), True, 700), ((), False, ENOUGH)],
)
def test_turns_that_begin_at_any_time_next_to_others_are_those_of_a_conversation_alone(
    model: PolicyModel, changes: tuple[int, ...], keeps_cache: bool, cached_tokens: int
) -> None:
    """Rows leave and join between tokens, and the sampler is told of new weights, which have the old values."""

    async def together(sampler: Counted) -> list[list[Completion]]:
        tasks = [asyncio.create_task(conversation(sampler, index)) for index in range(6)]
        for step in range(1000):
            await asyncio.sleep(0)
            if step in changes:
                sampler.weights_changed()
        return await asyncio.gather(*tasks)

    sampler = Counted(model, cached_tokens, 4, keeps_cache=keeps_cache)
    found = asyncio.run(together(sampler))
    assert sampler.turns
    assert sampler.most <= cached_tokens
    for index, turns in enumerate(found):
        alone = asyncio.run(conversation(Counted(model, 0, 1), index))
        for ours, theirs in zip(turns, alone, strict=True):
            assert ours.token_ids.tolist() == theirs.token_ids.tolist()
            assert np.abs(ours.logprobs - theirs.logprobs).max() < 1e-5


def test_a_turn_computes_what_is_new(model: PolicyModel) -> None:
    sampler = Counted(model, ENOUGH)
    asyncio.run(conversations(sampler, 3))
    assert len(sampler.turns) == 2 * 4, "two further turns of four conversations"
    assert max(sampler.turns) == 1 + 1 + 3 * 2, "the last sampled token, and the longest answer of a tool"


def test_the_weights_a_pass_and_a_failure_end_what_is_kept(model: PolicyModel) -> None:
    for ends in ("weights_changed", "forget_turns", "_fail"):
        for keeps_cache in (False, True):
            sampler = Counted(model, ENOUGH, keeps_cache=keeps_cache)
            asyncio.run(conversations(sampler, 1))
            assert len(sampler.kept) == 4
            getattr(sampler, ends)()
            assert sampler.kept == []


def test_a_turn_of_one_token_is_kept_next_to_others(model: PolicyModel) -> None:
    """It ends before the table of rows has a slot for it."""

    async def story(sampler: EmbeddedSampler) -> list[Completion]:
        long = asyncio.create_task(sampled(sampler, requests_of([range(40, 50)], 0, max_tokens=30)))
        for _ in range(5):
            await asyncio.sleep(0)
        [short] = await sampled(sampler, requests_of([range(60, 70)], 1, max_tokens=1))
        return [*await long, short, *await sampled(sampler, requests_of([[*range(60, 70), *short.token_ids, 70]], 2))]

    keeping = Counted(model, ENOUGH)
    found, expected = asyncio.run(story(keeping)), asyncio.run(story(Counted(model, 0)))
    assert [ours.token_ids.tolist() for ours in found] == [theirs.token_ids.tolist() for theirs in expected]
    assert keeping.turns == [2], "the sampled token, and the tool's"


def test_a_turn_that_is_mostly_new_is_computed_whole(model: PolicyModel) -> None:
    async def story(answer: int) -> list[int]:
        sampler = Counted(model, ENOUGH)
        (first,) = await sampled(sampler, requests_of([range(40, 50)], 0, max_tokens=5))
        await sampled(sampler, requests_of([[*range(40, 50), *first.token_ids, *range(100, 100 + answer)]], 1))
        return sampler.turns

    held = 10 + 5 - 1
    assert asyncio.run(story(held - 1)) == [held]
    assert asyncio.run(story(held)) == []


def test_passes_over_further_turns_have_bounded_masks(model: PolicyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_passes, "PASS_MASKS", 4 * 60 * 2 * 3)  # four rows of 60 own positions, heads in pairs
    sampler, plain = Counted(model, ENOUGH), Counted(model, 0)
    found, expected = asyncio.run(conversations(sampler)), asyncio.run(conversations(plain))
    assert [ours.token_ids.tolist() for ours in found] == [theirs.token_ids.tolist() for theirs in expected]
    for now in sampler.row_passes:
        assert now.tokens * len(now.own_R) * now.longest_own * 2 <= prompt_passes.PASS_MASKS, "two heads share keys"
    assert max(sampler.turns) > 2


@pytest.mark.parametrize("fault", ["wrong", "raises", None])
def test_a_model_that_cannot_continue_turns_keeps_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str | None
) -> None:
    model = model_of(write_tiny_model(tmp_path, "Llama", num_key_value_heads=2))
    forward = model.transformer.base_model.forward

    def odd(*arguments: Any, **settings: Any) -> Any:
        now = getattr(settings.get("past_key_values"), "now", None)
        if fault and isinstance(now, RowPass) and now.tokens > 1 and now.same_own is None:
            if fault == "raises":
                raise ValueError("rows of one length only")
            settings["input_ids"] = settings["input_ids"].flip(1)
        return forward(*arguments, **settings)

    monkeypatch.setattr(model.transformer.base_model, "forward", odd)
    sampler = Counted(model, ENOUGH)
    assert len(asyncio.run(conversations(sampler))) == 4 * 4
    assert len(sampler.kept) == (0 if fault else 4)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_keys_that_depend_on_the_length_of_a_pass_are_not_kept(tmp_path: Path, kind: str) -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4} if kind == "longrope" else {}
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64, **factors}
    model = model_of(write_tiny_model(tmp_path, "Llama", num_key_value_heads=2, rope_parameters=rope))
    sampler, plain = Counted(model, ENOUGH, prompt_tokens=30), Counted(model, 0)
    assert sampler._decoder.least_shared is None
    requests = requests_of([range(40, 130)], 0, max_tokens=1)
    (ours,), (theirs,) = (asyncio.run(sampled(some, requests)) for some in (sampler, plain))
    assert ours.logprobs.tolist() == theirs.logprobs.tolist()
    assert sampler.kept == []


def test_rows_that_two_weights_computed_keep_nothing(model: PolicyModel) -> None:
    async def story() -> None:
        sampler = Counted(model, ENOUGH, keeps_cache=True)
        asking = asyncio.create_task(sampled(sampler, requests_of([range(40, 50)], 0)))
        for _ in range(4):
            await asyncio.sleep(0)
        sampler.weights_changed()
        (completion,) = await asking
        assert len(completion.versions) == 2
        assert sampler.kept == []

    asyncio.run(story())


def test_several_samples_of_a_further_turn_share_its_whole_prompt(model: PolicyModel) -> None:
    async def story(sampler: EmbeddedSampler) -> list[Completion]:
        (first,) = await sampled(sampler, requests_of([range(40, 50)], 0))
        return await sampled(sampler, requests_of([[*range(40, 50), *first.token_ids, 70, 71]], 1, n=3))

    keeping = Counted(model, ENOUGH, 2)
    found, expected = asyncio.run(story(keeping)), asyncio.run(story(Counted(model, 0, 2)))
    assert [ours.token_ids.tolist() for ours in found] == [theirs.token_ids.tolist() for theirs in expected]
    assert len(keeping.prompts) == 2
    assert keeping.turns == []


def test_rows_without_a_conversation_and_unfinished_ones_keep_nothing(model: PolicyModel) -> None:
    async def story() -> None:
        sampler = Counted(model, ENOUGH)
        await sampled(sampler, [GenerateRequest("r", tuple(range(40, 50)), Sampling(max_tokens=5), 2, 0)])
        assert sampler.kept == []
        leaving = sampler.generate(requests_of([range(40, 50)], 0, max_tokens=200))
        reading = asyncio.ensure_future(anext(leaving))
        for _ in range(20):
            await asyncio.sleep(0)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await leaving.aclose()
        assert sampler.kept == []

    asyncio.run(story())
