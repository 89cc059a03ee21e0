"""`rollout.on_new_weights=continue`: unfinished rows keep the keys and values of weights that have changed since."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from rlcore.config import ModelConfig
from rlcore.data.tokenizer import ByteTokens
from rlcore.engines.hf.cache_name import cache_name
from rlcore.engines.hf.sample import decode, prompt_passes, row_attention
from rlcore.engines.hf.sample.decode import PACK_TOKENS
from rlcore.engines.hf.sample.kv_cache import RowPass
from rlcore.engines.hf.sample.packed_linear import PackedLinears
from rlcore.engines.hf.sample.sampler import EmbeddedSampler
from rlcore.engines.hf.train.model import ModelKind, PolicyModel, load_model
from rlcore.testing.tiny import write_tiny_model
from rlcore.types import Completion, Float32s, GenerateRequest, Sampling

torch.set_num_threads(1)

FACTOR = 1.1


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PolicyModel:
    """Decoded with packed copies of its weights, as large models are."""
    monkeypatch.setattr(decode, "PackedLinears", partial(PackedLinears, smallest=1))
    path = write_tiny_model(tmp_path / "llama", num_key_value_heads=2)
    found = load_model(ModelKind.CAUSAL_LM, ModelConfig(path=str(path)), dtype="float32", device="cpu")
    assert isinstance(found, PolicyModel)
    return found


@torch.no_grad()
def scale(model: PolicyModel, factor: float) -> None:
    for parameter in model.parameters():
        parameter.mul_(factor)


@contextmanager
def old_weights(model: PolicyModel) -> Iterator[None]:
    scale(model, 1 / FACTOR)
    try:
        yield
    finally:
        scale(model, FACTOR)


@torch.no_grad()
def with_kept_cache(model: PolicyModel, prompt: tuple[int, ...], completion: Completion, change: int) -> Float32s:
    """Log-probs of a response whose tokens from `change` on new weights sampled, over what the old ones computed."""
    ids = [*prompt, *completion.token_ids.tolist()]
    logits: list[torch.Tensor] = []
    cache = {cache_name(model.transformer.base_model): DynamicCache()}

    def feed(tokens: list[int]) -> None:
        logits.extend(model.transformer(torch.tensor([tokens]), use_cache=True, **cache).logits[0])

    with old_weights(model):
        feed(ids[: len(prompt) + change - 1])
    for token in ids[len(prompt) + change - 1 :]:  # the last token of the old weights is fed to the new ones
        feed([token])
    scores_TV = torch.log_softmax(torch.stack(logits[len(prompt) - 1 : -1]), dim=-1)
    return scores_TV.gather(1, torch.tensor(ids[len(prompt) :])[:, None])[:, 0].numpy().astype(np.float32)


def sampled(model: PolicyModel, max_rows: int, *, keeps_cache: bool) -> tuple[list[Completion], list[GenerateRequest]]:
    """Two prompts with three samples each; the weights change after ten tokens."""
    version = 5
    sampler = EmbeddedSampler(
        model,
        ByteTokens(),
        max_rows=max_rows,
        device=torch.device("cpu"),
        version=lambda: version,
        keeps_cache=keeps_cache,
    )
    sampling = Sampling(max_tokens=3 * PACK_TOKENS)
    requests = [GenerateRequest(f"r{i}", tuple(range(40 + i, 45 + 3 * i)), sampling, 3, seed=i) for i in range(2)]

    async def story() -> list[Completion]:
        nonlocal version
        task = asyncio.create_task(_all(sampler, requests))
        for _ in range(10):
            await asyncio.sleep(0)
        assert len(sampler.rows) == min(max_rows, 6)
        assert sampler.num_waiting == 6 - len(sampler.rows)
        sampler.weights_changed()
        scale(model, FACTOR)
        version = 6
        return await task

    return asyncio.run(story()), requests


async def _all(sampler: EmbeddedSampler, requests: list[GenerateRequest]) -> list[Completion]:
    return [completion async for completion in sampler.generate(requests)]


@pytest.mark.slow
@pytest.mark.parametrize("max_rows", [6, 2])
def test_each_token_has_the_log_prob_of_the_weights_that_sampled_it_over_the_kept_cache(
    model: PolicyModel, max_rows: int
) -> None:
    completions, requests = sampled(model, max_rows, keeps_cache=True)
    prompts = {request.id: request.token_ids for request in requests}
    mixed = [completion for completion in completions if len(completion.versions) == 2]
    assert len(mixed) == min(max_rows, 6)
    for completion in mixed:
        (begin, old), (change, new) = completion.versions
        assert (begin, old, new, completion.version) == (0, 5, 6, 5)
        expected = with_kept_cache(model, prompts[completion.request_id], completion, change)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


@pytest.mark.slow
def test_rows_that_begin_after_the_change_compute_their_prompts_with_the_new_weights(model: PolicyModel) -> None:
    """Two of three samples of the first prompt are in flight, so the third finds it in the cache."""
    completions, requests = sampled(model, 2, keeps_cache=True)
    prompts = {request.id: request.token_ids for request in requests}
    later = [completion for completion in completions if completion.versions == ((0, 6),)]
    assert {completion.request_id for completion in later} == {"r0", "r1"}
    for completion in later:
        whole = torch.tensor([[*prompts[completion.request_id], *completion.token_ids.tolist()]])
        with torch.no_grad():
            logits_TV = model.transformer(whole).logits[0, len(prompts[completion.request_id]) - 1 : -1]
        expected = torch.log_softmax(logits_TV, -1).gather(1, torch.tensor(completion.token_ids[:, None]).long())
        np.testing.assert_allclose(completion.logprobs, expected[:, 0].numpy(), atol=1e-4)


@pytest.mark.slow
def test_without_it_rows_are_computed_again(model: PolicyModel) -> None:
    completions, requests = sampled(model, 6, keeps_cache=False)
    prompts = {request.id: request.token_ids for request in requests}
    completion = next(completion for completion in completions if len(completion.versions) == 2)
    change = completion.versions[1][0]
    kept = with_kept_cache(model, prompts[completion.request_id], completion, change)
    np.testing.assert_allclose(completion.logprobs[:change], kept[:change], atol=1e-4)
    assert np.abs(completion.logprobs[change:] - kept[change:]).max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("most_scores", [0, 2000, prompt_passes.PASS_SCORES])
def test_rows_are_computed_again_in_parts_on_a_device_that_holds_attention_scores(
    model: PolicyModel, monkeypatch: pytest.MonkeyPatch, most_scores: int
) -> None:
    monkeypatch.setattr(prompt_passes, "can_fuse", lambda device: False)
    monkeypatch.setattr(prompt_passes, "PASS_SCORES", most_scores)
    sizes: list[int] = []
    attend = row_attention.attend_apart

    def attended(query_RhMD: torch.Tensor, layer: Any, current: RowPass, *settings: Any) -> torch.Tensor:
        sizes.append(query_RhMD.shape[:3].numel() * (current.longest_prompt + current.longest_own))
        return attend(query_RhMD, layer, current, *settings)

    monkeypatch.setattr(row_attention, "attend_apart", attended)
    completions, requests = sampled(model, 6, keeps_cache=False)
    prompts = {request.id: request.token_ids for request in requests}
    mixed = [completion for completion in completions if len(completion.versions) == 2]
    assert len(mixed) == 6
    for completion in mixed:
        prompt, change = prompts[completion.request_id], completion.versions[1][0]
        with torch.no_grad():
            logits_TV = model.transformer(torch.tensor([[*prompt, *completion.token_ids.tolist()]])).logits[0]
        scores_TV = torch.log_softmax(logits_TV[len(prompt) - 1 : -1], -1)
        new_T = scores_TV.gather(1, torch.tensor(completion.token_ids[:, None]).long())[change:, 0]
        np.testing.assert_allclose(completion.logprobs[change:], new_T.numpy(), atol=1e-4)
    assert bool(sizes) is (most_scores > 0)
    assert max(sizes, default=0) <= most_scores


@pytest.mark.slow
def test_the_same_tokens_are_sampled_where_nothing_changes(model: PolicyModel) -> None:
    """A change to the same weights: kept keys and values are what would be computed again."""

    def tokens(keeps_cache: bool) -> dict[tuple[str, int], list[int]]:
        sampler = EmbeddedSampler(model, ByteTokens(), max_rows=3, device=torch.device("cpu"), keeps_cache=keeps_cache)
        request = GenerateRequest("r", (65, 66, 67), Sampling(max_tokens=40), 5, seed=1)

        async def story() -> list[Completion]:
            task = asyncio.create_task(_all(sampler, [replace(request, id=name) for name in ("a", "b")]))
            for turn in range(30):
                await asyncio.sleep(0)
                if turn % 7 == 0:
                    sampler.weights_changed()
            return await task

        return {(found.request_id, found.sample): found.token_ids.tolist() for found in asyncio.run(story())}

    assert tokens(True) == tokens(False)
