"""The memory of finished turns on the embedded rollout: what they share, and what gives way to what."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from counted_sampler import ENOUGH, Counted, conversations, model_of, requests_of, sampled

from rlcore.engines.hf.sample import prompt_passes, row_attention
from rlcore.engines.hf.sample.decode_row import DecodeGroup
from rlcore.engines.hf.sample.kept_turns import KeptTurns
from rlcore.engines.hf.sample.kv_cache import SlotCache, SlotLayer
from rlcore.engines.hf.train.model import PolicyModel
from rlcore.testing.tiny import write_tiny_model
from rlcore.types import Completion, GenerateRequest, Sampling

torch.set_num_threads(1)  # the models are tiny, and the tests may share their cores


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PolicyModel:
    return model_of(write_tiny_model(tmp_path_factory.mktemp("models") / "llama", num_key_value_heads=2))


def test_turns_are_there_twice_for_a_layer_only_and_give_way_before_a_copy(
    model: PolicyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    most, copies = 0, list[int]()
    write, copy = SlotLayer.write_row, SlotCache.copy_of_row
    texts = [range(40, 70), range(60, 95)]
    sampler = Counted(model, ENOUGH)
    first = asyncio.run(sampled(sampler, requests_of(texts, 0)))
    turns = list(sampler._decoder.kept._turns)

    def written(layer: SlotLayer, *arguments: Any) -> None:
        nonlocal most
        write(layer, *arguments)
        most = max(most, sum(len(turn.layers) + len(turn.prompt.layers) for turn in turns))

    monkeypatch.setattr(SlotLayer, "write_row", written)
    later = [[*ids, *found.token_ids, 70] for ids, found in zip(texts, first, strict=True)]
    asyncio.run(sampled(sampler, requests_of(later, 1)))
    num_layers = len(sampler._decoder.kept._turns[0].layers)
    assert most == 4 * num_layers - 3, "one of two rows, and both prompts before it"
    assert [turn.layers + turn.prompt.layers for turn in turns] == [[], []]

    small = Counted(model, 230)

    def copied(cache: SlotCache, *arguments: int) -> Any:
        copies.append(small._decoder.kept.num_tokens + cache.capacity + arguments[1])
        return copy(cache, *arguments)

    monkeypatch.setattr(SlotCache, "copy_of_row", copied)
    asyncio.run(conversations(small))
    assert 0 < max(copies) <= 230


def test_kept_turns_and_live_rows_have_the_planned_number_of_tokens_together(model: PolicyModel) -> None:
    sampler = Counted(model, 400)
    asyncio.run(conversations(sampler))
    assert 0 < sampler.most <= 400
    assert sampler.turns
    small = Counted(model, 30)
    asyncio.run(conversations(small))
    assert small.kept == []
    assert small.turns == []


@pytest.mark.parametrize(("prompt", "response"), [(185, 5), (5, 205)])
def test_turns_give_way_to_rows_as_soon_as_their_slots_grow(model: PolicyModel, prompt: int, response: int) -> None:
    sampler = Counted(model, 235)
    asyncio.run(conversations(sampler, 1))
    assert len(sampler.kept) == 4
    request = GenerateRequest("long", (50,) * prompt, Sampling(max_tokens=response), 1, 0)
    asyncio.run(sampled(sampler, [request]))
    assert 0 < len(sampler.kept) < 4
    assert sampler.most <= 235


def test_the_longest_beginning_is_taken_and_the_oldest_turn_dropped_first() -> None:
    turns, pair, nines, fives = KeptTurns(10), DecodeGroup((1, 2), 1), DecodeGroup((9, 9), 1), DecodeGroup((5,), 1)

    def kept(group: DecodeGroup, *own: int) -> None:
        assert turns.make_room(group, len(own), slots=0)
        turns.keep(group, np.array([*group.token_ids, *own], dtype=np.int32), [], list)

    def taken(*ids: int) -> list[int] | None:
        turn = turns.taken(ids)
        return None if turn is None else turn.token_ids.tolist()

    kept(pair)
    kept(pair, 3)
    kept(nines)
    assert turns.num_tokens == 2 + 1 + 2, "a prompt that two share counts once"
    assert taken(1, 2, 4) == [1, 2]
    assert taken(1, 2, 4) is None
    assert taken(1, 2, 3) is None, "the pass needs a token"
    assert taken(1, 2, 3, 4) == [1, 2, 3]
    assert turns.num_tokens == 2
    assert turns.make_room(fives, 2, slots=6)
    kept(fives, 5, 5)
    assert taken(9, 9, 9) is None, "it was the oldest"
    assert taken(5, 5, 5, 5) == [5, 5, 5]
    assert turns.make_room(fives, 3, slots=6)
    assert not turns.make_room(fives, 4, slots=6)
    assert turns.num_tokens == 0


def test_turns_of_a_group_share_its_prompt(model: PolicyModel) -> None:
    """Live and kept, it is there once, and turns that begin later find it in its slot or bring it back."""

    async def story(sampler: Counted) -> list[Completion]:
        prompt = range(40, 70)
        found = await sampled(sampler, requests_of([prompt], 0, n=3))
        if sampler.kept:
            assert sampler._decoder.kept.num_tokens == 30 + sum(sampler.kept)
        texts = [[*prompt, *completion.token_ids, 70 + index] for index, completion in enumerate(found)]
        first = asyncio.create_task(sampled(sampler, requests_of(texts[:2], 1, max_tokens=20)))
        for _ in range(2):
            await asyncio.sleep(0)
        second = asyncio.create_task(sampled(sampler, requests_of(texts[2:], 2)))
        for _ in range(2):
            await asyncio.sleep(0)
        groups.append((len(sampler._decoder.groups), len(sampler.rows)))
        found += [*await first, *await second]
        for index, ids in enumerate(texts):
            ids += [*found[3 + index].token_ids, 80]
            found += await sampled(sampler, requests_of([ids], 3))
        return found

    groups = list[tuple[int, int]]()
    keeping = Counted(model, ENOUGH)
    found, expected = asyncio.run(story(keeping)), asyncio.run(story(Counted(model, 0)))
    assert [ours.token_ids.tolist() for ours in found] == [theirs.token_ids.tolist() for theirs in expected]
    assert groups == [(1, 3), (3, 3)]
    assert len(keeping.prompts) == 1
    assert len(keeping.turns) == 6


@pytest.mark.parametrize("cached_tokens", [0, 4 * (12 + 60)])
def test_slots_of_turns_of_any_length_are_those_of_the_longest_prompt_and_response(
    model: PolicyModel, cached_tokens: int
) -> None:
    """Rows in their first turn have slots next to rows in their last."""
    prompt, response = 12, 60

    async def story(sampler: Counted) -> list[Completion]:
        texts, found = [[*range(40 + index, 52 + index)] for index in range(4)], list[Completion]()
        for turn in range(4):
            requests = requests_of(texts, turn, max_tokens=12)[: 1 if turn % 3 else 2]
            requests += requests_of(texts, 10 + turn, max_tokens=response)[2:] if not turn % 3 else []
            found += (every := await sampled(sampler, requests))
            for ids, completion, answer in zip(texts, every[: 1 if turn % 3 else 2], (4, 20), strict=False):
                ids += [*completion.token_ids.tolist(), *range(70, 70 + answer)]
        return found

    limited, plain = Counted(model, cached_tokens, 4, prompt_tokens=prompt), Counted(model, 0, 4)
    found, expected = asyncio.run(story(limited)), asyncio.run(story(plain))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        assert np.abs(ours.logprobs - theirs.logprobs).max() < 1e-5
    assert limited.most_slots <= 4 * (prompt + response) < plain.most_slots


def test_a_prompt_of_several_samples_is_computed_once_whatever_its_length(model: PolicyModel) -> None:
    sampler = Counted(model, ENOUGH, prompt_tokens=5)
    asyncio.run(sampled(sampler, requests_of([range(40, 70)], 0, n=3)))
    assert sampler.prompts == [30]
    assert sampler.turns == []


def test_there_are_no_more_prompts_than_rows(model: PolicyModel) -> None:
    """Requests with smaller names overtake those of which some samples wait."""

    async def story(sampler: Counted) -> int:
        async def three_samples(index: int) -> None:
            for _ in range(2 * index):
                await asyncio.sleep(0)
            ids = tuple(range(40 + index, 60 + index))
            request = GenerateRequest(f"{9 - index}", ids, Sampling(max_tokens=4), 3, index)
            assert len(await sampled(sampler, [request])) == 3

        tasks, most = [asyncio.create_task(three_samples(index)) for index in range(8)], 0
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            most = max(most, len(sampler._decoder.groups))
        await asyncio.gather(*tasks)
        return most

    assert asyncio.run(story(Counted(model, 0, 2))) == 2


def test_copies_of_turns_are_gone_before_other_prompts_are_computed(
    model: PolicyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = Counted(model, ENOUGH)
    (first,) = asyncio.run(sampled(sampler, requests_of([range(40, 50)], 0)))
    (turn,) = sampler._decoder.kept._turns
    left, prefill = list[int](), sampler._decoder._prefill

    def noted(*arguments: Any, **settings: Any) -> None:
        left.append(len(turn.layers) + len(turn.prompt.layers))
        prefill(*arguments, **settings)

    monkeypatch.setattr(sampler._decoder, "_prefill", noted)
    requests = requests_of([[*range(40, 50), *first.token_ids, 70], range(80, 120)], 1)
    asyncio.run(sampled(sampler, requests))
    assert left == [0]


def test_passes_over_further_turns_have_bounded_scores(model: PolicyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """On devices without one operation for attention with log-sums; a prompt of many rows is next to those of one."""

    async def story(sampler: Counted) -> list[Completion]:
        found = await sampled(sampler, requests_of([range(40, 60)], 0, n=5))
        found += (alone := await sampled(sampler, requests_of([range(60 + 9 * i, 80 + 9 * i) for i in range(3)], 1)))
        texts = [[*range(40, 60), *completion.token_ids] for completion in found[:5]]
        texts += [[*range(60 + 9 * i, 80 + 9 * i), *completion.token_ids] for i, completion in enumerate(alone)]
        return found + await sampled(sampler, requests_of([[*ids, *range(70, 80)] for ids in texts], 2))

    for module in (prompt_passes, row_attention):
        monkeypatch.setattr(module, "can_fuse", lambda device: False)
    monkeypatch.setattr(prompt_passes, "PASS_SCORES", 4 * 20 * 20 * 3)
    sampler, plain = Counted(model, ENOUGH, 8), Counted(model, 0, 8)
    found, expected = asyncio.run(story(sampler)), asyncio.run(story(plain))
    assert [ours.token_ids.tolist() for ours in found] == [theirs.token_ids.tolist() for theirs in expected]
    wide = [now for now in sampler.row_passes if now.tokens > 1]
    assert wide
    for now in wide:
        scores = now.rows_GW.numel() * now.longest_prompt + len(now.own_R) * now.longest_own
        assert 4 * now.tokens * scores <= prompt_passes.PASS_SCORES


@pytest.mark.parametrize("architecture", ["GPT2", "GPTJ"])
def test_padding_has_no_positions_after_the_window(tmp_path: Path, architecture: str) -> None:
    """A turn with a long prompt and few other tokens is padded to one with many."""
    settings = {"n_embd": 32, "n_layer": 2, "n_head": 4, "max_position_embeddings": 64, "rotary_dim": 8}
    model = model_of(write_tiny_model(tmp_path, architecture, **settings), attention="eager")

    async def story(sampler: Counted) -> list[Completion]:
        texts = [[*range(40, 44)], [*range(100, 150)]]
        first = await sampled(sampler, requests_of(texts, 0, max_tokens=6))
        for ids, completion, answer in zip(texts, first, (40, 1), strict=True):
            ids += [*completion.token_ids.tolist(), *range(150, 150 + answer)]
        (long,) = await sampled(sampler, requests_of([texts[0][:30]], 1, max_tokens=6))
        texts[0] = [*texts[0][:30], *long.token_ids.tolist(), *range(150, 170)]
        return [*first, long, *await sampled(sampler, requests_of(texts, 2, max_tokens=4))]

    keeping = Counted(model, ENOUGH, prompt_tokens=50)
    found, expected = asyncio.run(story(keeping)), asyncio.run(story(Counted(model, 0)))
    assert [ours.token_ids.tolist() for ours in found] == [theirs.token_ids.tolist() for theirs in expected]
    assert any(int((now.prompt_R + now.own_R).max()) + now.tokens > 64 for now in keeping.row_passes)
