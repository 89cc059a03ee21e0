"""Turns of a conversation on the embedded rollout: each computes what is new, and samples as if it computed all."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlcore.config import ModelConfig
from rlcore.data.tokenizer import ByteTokens
from rlcore.engines.hf.sample import decode
from rlcore.engines.hf.sample.kept_turns import KeptTurn, KeptTurns
from rlcore.engines.hf.sample.kv_cache import PromptPass, RowPass, SlotCache, SlotLayer
from rlcore.engines.hf.sample.sampler import EmbeddedSampler
from rlcore.engines.hf.train.model import ModelKind, PolicyModel, load_model
from rlcore.testing.tiny import write_tiny_model
from rlcore.types import Completion, GenerateRequest, Sampling

torch.set_num_threads(1)  # the models are tiny, and the tests may share their cores

ENOUGH = 10_000
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


def model_of(path: Path, dtype: str = "float64", attention: Any = "sdpa") -> PolicyModel:
    config = ModelConfig(path=str(path), attention=attention)
    model = load_model(ModelKind.CAUSAL_LM, config, dtype=dtype, device="cpu")
    assert isinstance(model, PolicyModel)
    return model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PolicyModel:
    return model_of(write_tiny_model(tmp_path_factory.mktemp("models") / "llama", num_key_value_heads=2))


class Counted(EmbeddedSampler):
    """A sampler that counts the tokens of its passes over prompts and over further turns, and of what it keeps."""

    def __init__(self, model: PolicyModel, cached_tokens: int, max_rows: int = 8, *, keeps_cache: bool = False) -> None:
        super().__init__(
            model,
            ByteTokens(),
            max_rows=max_rows,
            device=torch.device("cpu"),
            keeps_cache=keeps_cache,
            cached_tokens=cached_tokens,
        )
        self.prompts, self.turns, compute = list[int](), list[int](), self._decoder._pass
        self.most = 0
        """Tokens of kept turns and of the slots of live rows together, where there were kept turns."""

        def counted(now: PromptPass | RowPass, token_ids_NT: Any) -> Any:
            if isinstance(now, PromptPass):
                self.prompts += [token_ids_NT.shape[1]] * len(token_ids_NT)
            elif now.tokens > 1:
                self.turns += [now.tokens] * len(token_ids_NT)
            return compute(now, token_ids_NT)

        self._decoder._pass = counted  # type: ignore[method-assign]

    def _step(self) -> None:
        super()._step()
        if self.kept:
            self.most = max(self.most, sum(self.kept) + self._decoder._cache.capacity)

    @property
    def kept(self) -> list[int]:
        """Tokens of each kept turn."""
        return [len(turn.token_ids) for turn in self._decoder.kept._turns]


def requests_of(texts: Sequence[Sequence[int]], turn: int, n: int = 1, max_tokens: int = 9) -> list[GenerateRequest]:
    sampling = Sampling(max_tokens=max_tokens)
    return [
        GenerateRequest(f"g{index}/{turn}", tuple(ids), sampling, n, seed=17 * index + turn, conversation=f"g{index}")
        for index, ids in enumerate(texts)
    ]


async def sampled(sampler: EmbeddedSampler, requests: Sequence[GenerateRequest]) -> list[Completion]:
    found = [completion async for completion in sampler.generate(requests)]
    return sorted(found, key=lambda completion: (completion.request_id, completion.sample))


async def conversations(sampler: EmbeddedSampler, num_turns: int = 4) -> list[Completion]:
    """Two groups of two conversations, whose first turns share a prompt, with tools' answers of different lengths."""
    every = await sampled(sampler, requests_of([range(40, 52), range(60, 65)], 0, n=2))
    texts = [[*range(40, 52), *every[index].token_ids] for index in (0, 1)]
    texts += [[*range(60, 65), *every[index].token_ids] for index in (2, 3)]
    for turn in range(1, num_turns):
        for index, ids in enumerate(texts):
            ids += range(70, 71 + index * turn)
        found = await sampled(sampler, requests_of(texts, turn))
        for ids, completion in zip(texts, found, strict=True):
            ids += completion.token_ids.tolist()
        every += found
    return every


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


def test_turns_are_there_twice_for_a_layer_only_and_give_way_before_a_copy(
    model: PolicyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    most, copies = 0, list[int]()
    write, copy = SlotLayer.write_prompts, SlotCache.states_of
    texts = [range(40, 70), range(60, 95)]
    sampler = Counted(model, ENOUGH)
    first = asyncio.run(sampled(sampler, requests_of(texts, 0)))
    turns = list(sampler._decoder.kept._turns)

    def written(layer: SlotLayer, *arguments: Any) -> None:
        nonlocal most
        write(layer, *arguments)
        most = max(most, sum(len(turn.layers) for turn in turns))

    monkeypatch.setattr(SlotLayer, "write_prompts", written)
    later = [[*ids, *found.token_ids, 70] for ids, found in zip(texts, first, strict=True)]
    asyncio.run(sampled(sampler, requests_of(later, 1)))
    num_layers = len(sampler._decoder.kept._turns[0].layers)
    assert most == 2 * num_layers - 1
    assert [turn.layers for turn in turns] == [[], []]

    def copied(cache: SlotCache, *arguments: int) -> Any:
        copies.append(sum(small.kept) + cache.capacity + arguments[1] + arguments[3])
        return copy(cache, *arguments)

    monkeypatch.setattr(SlotCache, "states_of", copied)
    small = Counted(model, 230)
    asyncio.run(conversations(small))
    assert 0 < max(copies) <= 230


def test_passes_over_further_turns_have_bounded_masks(model: PolicyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "PASS_MASKS", 4 * 60 * 2 * 3)  # four rows of 60 positions, heads in pairs
    sampler, plain = Counted(model, ENOUGH), Counted(model, 0)
    found, expected = asyncio.run(conversations(sampler)), asyncio.run(conversations(plain))
    assert [ours.token_ids.tolist() for ours in found] == [theirs.token_ids.tolist() for theirs in expected]
    assert max(sampler.turns) <= 6


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_keys_that_depend_on_the_length_of_a_pass_are_not_kept(tmp_path: Path, kind: str) -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4} if kind == "longrope" else {}
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64, **factors}
    model = model_of(write_tiny_model(tmp_path, "Llama", num_key_value_heads=2, rope_parameters=rope))
    sampler = EmbeddedSampler(model, ByteTokens(), max_rows=4, device=torch.device("cpu"), cached_tokens=ENOUGH)
    assert sampler._decoder.least_shared is None
    asyncio.run(sampled(sampler, requests_of([range(40, 50)], 0)))
    assert sampler._decoder.kept._turns == []


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


def test_kept_turns_and_live_rows_have_the_planned_number_of_tokens_together(model: PolicyModel) -> None:
    sampler = Counted(model, 400)
    asyncio.run(conversations(sampler))
    assert 0 < sampler.most <= 400
    assert sampler.turns
    small = Counted(model, 30)
    asyncio.run(conversations(small))
    assert small.kept == []
    assert small.turns == []


@pytest.mark.parametrize(("prompt", "response"), [(185, 5), (5, 150)])
def test_turns_give_way_to_rows_as_soon_as_their_slots_grow(model: PolicyModel, prompt: int, response: int) -> None:
    sampler = Counted(model, 250)
    asyncio.run(conversations(sampler, 1))
    assert len(sampler.kept) == 4
    request = GenerateRequest("long", (50,) * prompt, Sampling(max_tokens=response), 1, 0)
    asyncio.run(sampled(sampler, [request]))
    assert 0 < len(sampler.kept) < 4
    assert sampler.most <= 250


def test_the_longest_beginning_is_taken_and_the_oldest_turn_dropped_first() -> None:
    turns = KeptTurns(10)

    def kept(*ids: int) -> KeptTurn:
        return KeptTurn(np.array(ids, dtype=np.int32), ())

    for ids in ((1, 2), (1, 2, 3), (9, 9)):
        assert turns.make_room(len(ids), slots=0)
        turns.keep(kept(*ids))
    assert turns.taken((1, 2, 4)).token_ids.tolist() == [1, 2]  # type: ignore[union-attr]
    assert turns.taken((1, 2, 4)) is None
    assert turns.taken((1, 2, 3)) is None, "the pass needs a token"
    assert turns.taken((1, 2, 3, 4)).token_ids.tolist() == [1, 2, 3]  # type: ignore[union-attr]
    assert turns.make_room(3, slots=6)
    turns.keep(kept(5, 5, 5))
    assert turns.taken((9, 9, 9)) is None, "it was the oldest"
    assert turns.taken((5, 5, 5, 5)) is not None
    assert turns.make_room(4, slots=6)
    assert not turns.make_room(5, slots=6)
