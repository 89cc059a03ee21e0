"""Calls that overlap share one table of rows: joins, early ends, failures, and weights that change meanwhile."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlcore.config import ModelConfig
from rlcore.data.tokenizer import ByteTokens
from rlcore.engines.hf.sample.decode import PACK_TOKENS
from rlcore.engines.hf.sample.packed_linear import PackedLinears, siblings_of, watching
from rlcore.engines.hf.sample.prompt_passes import PASS_TOKENS
from rlcore.engines.hf.sample.sampler import EmbeddedSampler
from rlcore.engines.hf.train.model import ModelKind, PolicyModel, load_model
from rlcore.errors import WorkerError
from rlcore.plan.memory import PREFILL_TOKENS
from rlcore.testing.tiny import write_tiny_model
from rlcore.types import Completion, FinishReason, GenerateRequest, Sampling

torch.set_num_threads(1)  # the models are tiny, and the tests may share their cores

CPU = torch.device("cpu")
Found = dict[tuple[str, int], list[int]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "llama", num_key_value_heads=2)


@pytest.fixture(scope="module")
def model(path: Path) -> PolicyModel:
    """For tests that leave it as it is."""
    return model_of(path)


def model_of(path: Path, dtype: str = "float64") -> PolicyModel:
    model = load_model(ModelKind.CAUSAL_LM, ModelConfig(path=str(path)), dtype=dtype, device="cpu")
    assert isinstance(model, PolicyModel)
    return model


def sampler_of(model: PolicyModel, max_rows: int = 4, **settings: Any) -> EmbeddedSampler:
    return EmbeddedSampler(model, ByteTokens(), max_rows=max_rows, device=CPU, **settings)


def requests_of(num: int, n: int = 2, max_tokens: int = 20, name: str = "r") -> list[GenerateRequest]:
    return [
        GenerateRequest(f"{name}{i}", tuple(range(40 + i, 45 + 3 * i)), Sampling(max_tokens=max_tokens), n, seed=i)
        for i in range(num)
    ]


async def turns(num: int) -> None:
    """Let the loop's other tasks have theirs: some tokens later."""
    for _ in range(num):
        await asyncio.sleep(0)


async def all_of(sampler: EmbeddedSampler, requests: Sequence[GenerateRequest]) -> list[Completion]:
    return [completion async for completion in sampler.generate(requests)]


def ids_of(completions: Sequence[Completion]) -> Found:
    return {(completion.request_id, completion.sample): completion.token_ids.tolist() for completion in completions}


@pytest.mark.slow
def test_calls_that_overlap_are_decoded_together_and_get_what_they_would_alone(model: PolicyModel) -> None:
    early, late = requests_of(3, max_tokens=30), requests_of(2, max_tokens=10, name="a")
    alone = {
        **ids_of(asyncio.run(all_of(sampler_of(model), early))),
        **ids_of(asyncio.run(all_of(sampler_of(model), late))),
    }
    sampler = sampler_of(model, max_rows=8)
    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, len(sampler.rows))
            await asyncio.sleep(0)

    async def story() -> Found:
        watcher, first = asyncio.create_task(watch()), asyncio.create_task(all_of(sampler, early))
        await turns(8)
        found = {**ids_of(await all_of(sampler, late)), **ids_of(await first)}
        watcher.cancel()
        return found

    assert asyncio.run(story()) == alone
    assert most > 6
    assert (len(sampler.rows), sampler.num_waiting) == (0, 0)


def test_a_stream_that_stops_early_frees_its_rows_and_disturbs_no_other(model: PolicyModel) -> None:
    expected = ids_of(asyncio.run(all_of(sampler_of(model), requests_of(2))))
    sampler = sampler_of(model)

    async def story() -> Found:
        other = asyncio.create_task(all_of(sampler, requests_of(2)))
        mixed = [
            replace(request, sampling=Sampling(max_tokens=1 + 60 * i))
            for i, request in enumerate(requests_of(2, name="a"))
        ]
        async with aclosing(sampler.generate(mixed)) as completions:  # type: ignore[type-var]
            async for _ in completions:
                break
        assert len(sampler.rows) + sampler.num_waiting <= 4
        return ids_of(await other)

    assert asyncio.run(story()) == expected
    assert (len(sampler.rows), sampler.num_waiting) == (0, 0)


def test_a_cancelled_call_leaves_nothing_behind(model: PolicyModel) -> None:
    sampler = sampler_of(model)

    async def story() -> int:
        task = asyncio.create_task(all_of(sampler, requests_of(3, max_tokens=200)))
        await turns(5)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return len(asyncio.all_tasks())

    assert asyncio.run(story()) == 1
    assert (len(sampler.rows), sampler.num_waiting) == (0, 0)


@pytest.mark.slow
def test_a_row_continues_with_new_weights_and_records_where(path: Path) -> None:
    model = model_of(path)
    version = 5
    sampler = sampler_of(model, version=lambda: version)
    requests = [replace(request, sampling=Sampling(max_tokens=40)) for request in requests_of(2, n=3)]

    async def story() -> list[Completion]:
        nonlocal version
        task = asyncio.create_task(all_of(sampler, requests))
        await turns(10)
        sampler.weights_changed()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        version = 6
        return await task

    def logprobs(request: GenerateRequest, completion: Completion) -> np.ndarray[Any, Any]:
        whole_1T = torch.tensor([[*request.token_ids, *completion.token_ids.tolist()]])
        with torch.no_grad():
            logits_TV = model.transformer(whole_1T).logits[0, len(request.token_ids) - 1 : -1]
        scores_T = torch.log_softmax(logits_TV, dim=-1).gather(1, whole_1T[0, len(request.token_ids) :, None])
        return scores_T[:, 0].numpy()

    completions = asyncio.run(story())
    changed = [completion for completion in completions if len(completion.versions) == 2]
    assert changed
    by_id = {request.id: request for request in requests}
    after = {(tensor.request_id, tensor.sample): logprobs(by_id[tensor.request_id], tensor) for tensor in changed}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.div_(1.1)
    for tensor in changed:
        (first, old), (offset, new) = tensor.versions
        assert (first, old, new, tensor.version) == (0, 5, 6, 5)
        before = logprobs(by_id[tensor.request_id], tensor)
        np.testing.assert_allclose(tensor.logprobs[:offset], before[:offset], atol=1e-5)
        np.testing.assert_allclose(
            tensor.logprobs[offset:], after[tensor.request_id, tensor.sample][offset:], atol=1e-5
        )
        assert np.abs(before[offset:] - tensor.logprobs[offset:]).max() > 1e-3


@pytest.mark.slow
def test_tokens_between_an_update_and_its_publication_are_a_run_of_the_old_version(model: PolicyModel) -> None:
    version = 5
    sampler = sampler_of(model, version=lambda: version)

    async def story() -> list[Completion]:
        nonlocal version
        task = asyncio.create_task(all_of(sampler, requests_of(2, max_tokens=60)))
        await turns(10)
        sampler.weights_changed()  # an update
        await turns(10)
        version = 6  # published
        return await task

    completions = asyncio.run(story())
    longest = max(completions, key=lambda completion: len(completion.token_ids))
    assert [number for _, number in longest.versions] == [5, 5, 6]
    starts = [start for start, _ in longest.versions]
    assert starts[0] == 0
    assert starts == sorted(set(starts))


def test_rows_wait_while_they_may_not_be_sampled(model: PolicyModel) -> None:
    expected = ids_of(asyncio.run(all_of(sampler_of(model), requests_of(2))))
    may_sample = True
    sampler = sampler_of(model, may_sample=lambda: may_sample)

    async def story() -> Found:
        nonlocal may_sample
        task = asyncio.create_task(all_of(sampler, requests_of(2)))
        await turns(6)
        may_sample = False
        await turns(2)
        before = [len(row.token_ids) for row in sampler.rows]
        await asyncio.sleep(0.02)
        assert [len(row.token_ids) for row in sampler.rows] == before
        assert min(before) > 0
        may_sample = True
        return ids_of(await task)

    assert asyncio.run(story()) == expected


def test_logits_that_are_not_numbers_end_each_call_with_its_own_request(path: Path) -> None:
    model = model_of(path, "float32")
    sampler = sampler_of(model, max_rows=8)
    with torch.no_grad():
        model.head.linear.weight[7, 3] = float("nan")

    async def story() -> list[Any]:
        calls = (all_of(sampler, requests_of(1, name=name)) for name in ("a", "b"))
        return list(await asyncio.gather(*calls, return_exceptions=True))

    for name, error in zip("ab", asyncio.run(story()), strict=True):
        assert isinstance(error, WorkerError)
        assert f"request '{name}0', sample 0: the logits after 5 tokens are not finite" in str(error)
    assert (len(sampler.rows), sampler.num_waiting) == (0, 0)


def test_no_prompts_give_no_completions_and_an_end_at_once_is_a_response(path: Path) -> None:
    model = model_of(path)
    sampler = sampler_of(model)
    assert asyncio.run(all_of(sampler, [])) == []
    with torch.no_grad():
        model.head.linear.weight.zero_()
    tokens = ByteTokens()
    tokens.eos_ids = frozenset(range(264))
    ending = EmbeddedSampler(model, tokens, max_rows=3, device=CPU)
    for completion in asyncio.run(all_of(ending, requests_of(2, n=3))):
        assert (len(completion.token_ids), completion.finish) == (1, FinishReason.STOP)


@pytest.mark.slow
def test_what_was_sampled_before_decides_nothing(tmp_path: Path) -> None:
    """Bit for bit, in a model that is large enough for packed weights: a run that resumes has not sampled before."""
    model = model_of(write_tiny_model(tmp_path / "wide", hidden_size=256, num_hidden_layers=1), "float32")
    short, sampler = requests_of(2, max_tokens=PACK_TOKENS - 1), sampler_of(model)
    long = asyncio.run(all_of(sampler, requests_of(2, max_tokens=2 * PACK_TOKENS)))
    later, fresh = (asyncio.run(all_of(value, short)) for value in (sampler, sampler_of(model)))
    assert ids_of(later) == ids_of(fresh)
    for mine, theirs in zip(sorted_by_id(later), sorted_by_id(fresh), strict=True):
        np.testing.assert_array_equal(mine.logprobs, theirs.logprobs)
    # Packed weights round otherwise, or the test shows nothing.
    pairs = zip(sorted_by_id(long), sorted_by_id(fresh), strict=True)
    assert any((mine.logprobs[: len(pair.logprobs)] != pair.logprobs).any() for mine, pair in pairs)


@pytest.mark.slow
@pytest.mark.parametrize(("prompts", "min_p"), [((5, 5), 0.0), ((3, 7), 0.9)])
def test_fused_decoding_gives_what_the_modules_give(tmp_path: Path, prompts: tuple[int, ...], min_p: float) -> None:
    """With weights packed meanwhile, rows that end early, padded prompts and uneven groups."""
    model = model_of(
        write_tiny_model(tmp_path, "Qwen3", hidden_size=256, num_hidden_layers=1, num_key_value_heads=2, head_dim=64),
        "float32",
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.rand(parameter.shape, generator=torch.Generator().manual_seed(1)))
    requests = [
        GenerateRequest(f"r{i}", tuple(range(40, 40 + num)), Sampling(max_tokens=12 + 9 * i, min_p=min_p), 2 + i, i)
        for i, num in enumerate(prompts)
    ]
    sampler = sampler_of(model, max_rows=8)
    decoder = sampler._decoder
    assert decoder.shortens
    short = sorted_by_id(asyncio.run(all_of(sampler, requests)))
    decoder.shortens = False
    plain = sorted_by_id(asyncio.run(all_of(sampler, requests)))
    for mine, theirs in zip(short, plain, strict=True):
        assert mine.token_ids.tolist() == theirs.token_ids.tolist()
        np.testing.assert_allclose(mine.logprobs, theirs.logprobs, atol=2e-5)


def test_a_model_whose_activation_is_changed_goes_through_its_own_modules(path: Path) -> None:
    """Found out by the comparison with the forward pass, as nothing in the model's form says so."""
    model = model_of(path)
    for layer in model.transformer.model.layers:
        mlp = layer.mlp
        mlp.act_fn = torch.nn.Tanh()
    sampler = sampler_of(model)
    assert not sampler._decoder.shortens
    found = ids_of(asyncio.run(all_of(sampler, requests_of(1, n=1, max_tokens=3))))
    assert len(found["r0", 0]) <= 3


def test_the_plan_uses_the_sizes_that_are_computed_with() -> None:
    assert PREFILL_TOKENS == PASS_TOKENS


def sorted_by_id(completions: Sequence[Completion]) -> list[Completion]:
    return sorted(completions, key=lambda completion: (completion.request_id, completion.sample))


def test_packed_weights_multiply_as_the_layers_do_and_are_put_away(path: Path) -> None:
    model = model_of(path, "float32")
    token_ids_BT = torch.arange(20)[None] + 60
    with torch.no_grad(), watching(model.transformer) as calls:
        expected = model.transformer(token_ids_BT).logits
    siblings = siblings_of(calls)
    assert [len(sibling) for sibling in siblings] == [3, 2] * 2  # queries, keys and values; gate and up
    for sets, num in ((siblings, 2 * 4 + 1), ([], 2 * 7 + 1)):
        packed = PackedLinears(model.transformer, num_rows=4, siblings=sets, smallest=1)
        with torch.no_grad(), packed.used():
            found = [model.transformer(ids_BT).logits for ids_BT in (token_ids_BT, token_ids_BT + 1, token_ids_BT)]
        assert packed.num_products == num
        assert not any("forward" in vars(module) for module in model.modules())
        torch.testing.assert_close(found[0], expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(found[2], found[0], atol=0.0, rtol=0.0)
        assert (found[1] - found[0]).abs().max() > 1e-2


@pytest.mark.usefixtures("native_bfloat16")
def test_a_slightly_changed_activation_is_found_in_bfloat16(path: Path) -> None:
    """Its logits differ by 7 %, which is less than decoding may differ from the forward pass in this format."""

    class Louder(torch.nn.Module):
        def forward(self, states: torch.Tensor) -> torch.Tensor:
            return 1.2 * torch.nn.functional.silu(states)

    model = model_of(path, "bfloat16")
    assert sampler_of(model)._decoder.shortens
    for layer in model.transformer.model.layers:
        layer.mlp.act_fn = Louder()
    assert not sampler_of(model)._decoder.shortens
