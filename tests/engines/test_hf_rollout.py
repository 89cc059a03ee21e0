"""The embedded rollout: transformers' own greedy tokens, exact log-probs, and no dependence on order or time."""

import asyncio
import gc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rlcore.algo.loss import clip
from rlcore.config import AlgoConfig, EngineConfig, ModelConfig
from rlcore.data.batch import collate
from rlcore.data.tokenizer import ByteTokens
from rlcore.engines.hf import TrainEngine
from rlcore.engines.hf.sample.kv_cache import SlotCache, SlotLayer
from rlcore.engines.hf.sample.sampler import EmbeddedSampler
from rlcore.engines.hf.sample.sampling import row_stream
from rlcore.engines.hf.train.model import ModelKind, PolicyModel, load_model
from rlcore.engines.hf.train.policy_loss import PolicyLoss
from rlcore.errors import ConfigError, WorkerError
from rlcore.testing.tiny import END, VOCABULARY, write_tiny_model
from rlcore.types import (
    Completion,
    FinishReason,
    GenerateRequest,
    Prompt,
    Reward,
    Sampling,
    ScoredTrajectory,
    Trajectory,
    TrajectoryId,
)

torch.set_num_threads(1)  # the models are tiny, and the tests may share their cores

CPU = torch.device("cpu")
GREEDY = Sampling(temperature=0.0, max_tokens=24)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "llama", num_key_value_heads=2)


@pytest.fixture(scope="module")
def policy(llama: Path) -> PolicyModel:
    """For tests that leave it as it is."""
    return model_of(llama)


def model_of(path: Path) -> PolicyModel:
    model = load_model(ModelKind.CAUSAL_LM, ModelConfig(path=str(path)), dtype="float64", device="cpu")
    assert isinstance(model, PolicyModel)
    return model


def sampler_of(model: PolicyModel, max_rows: int = 64) -> EmbeddedSampler:
    return EmbeddedSampler(model, ByteTokens(), max_rows=max_rows, device=CPU, version=lambda: 3)


def requests_of(sampling: Sampling, num: int = 4, n: int = 2) -> list[GenerateRequest]:
    """Prompts of different lengths."""
    return [GenerateRequest(f"r{i}", tuple(range(40 + i, 45 + 3 * i)), sampling, n, seed=i) for i in range(num)]


def generated(sampler: EmbeddedSampler, requests: Sequence[GenerateRequest]) -> dict[tuple[str, int], Completion]:
    async def run() -> list[Completion]:
        return [completion async for completion in sampler.generate(requests)]

    completions = asyncio.run(run())
    found = {(completion.request_id, completion.sample): completion for completion in completions}
    assert len(found) == len(completions)
    return found


def ids_of(completions: dict[tuple[str, int], Completion]) -> dict[tuple[str, int], list[int]]:
    return {key: completion.token_ids.tolist() for key, completion in completions.items()}


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_recorded_logprobs_are_those_of_the_trainer(llama: Path, temperature: float) -> None:
    loss, model = PolicyLoss(clip, AlgoConfig()), ModelConfig(path=str(llama))
    engine = TrainEngine("causal_lm", model, EngineConfig(), loss, temperature=temperature)
    requests = requests_of(Sampling(temperature=temperature, max_tokens=16), num=6, n=3)
    completions = generated(sampler_of(engine.policy), requests)
    batch = collate(
        [[scored(request, completions[request.id, i]) for i in range(request.n)] for request in requests], END
    )
    arrays = batch.tokens
    difference = (engine.logprobs(batch) - arrays.rollout_logprobs_BT)[arrays.loss_mask_BT]
    assert np.abs(difference).max() < 1e-4
    assert np.exp(difference).mean() == pytest.approx(1.0, abs=1e-5)


def scored(request: GenerateRequest, completion: Completion) -> ScoredTrajectory:
    num_prompt = len(request.token_ids)
    token_ids = np.concatenate([np.array(request.token_ids, dtype=np.int32), completion.token_ids])
    trajectory = Trajectory(
        id=TrajectoryId(request.id, 0, completion.sample),
        prompt=Prompt(request.id, (), None, ""),
        token_ids=token_ids,
        loss_mask=np.arange(len(token_ids)) >= num_prompt,
        logprobs=np.concatenate([np.zeros(num_prompt, dtype=np.float32), completion.logprobs]),
        completion="",
        finish=completion.finish,
        versions=((num_prompt, completion.version),),
    )
    return ScoredTrajectory(trajectory, Reward(0.0))


def test_recorded_logprobs_are_of_what_truncation_kept_and_those_of_a_greedy_row_have_temperature_one(
    policy: PolicyModel,
) -> None:
    sampler = sampler_of(policy)
    truncated = Sampling(temperature=0.5, top_k=2, max_tokens=1)
    for sampling, temperature, num_kept in ((truncated, 0.5, 2), (replace(GREEDY, max_tokens=1), 1.0, None)):
        (request,) = requests_of(sampling, num=1, n=1)
        (completion,) = generated(sampler, [request]).values()
        with torch.no_grad():
            logits_V = policy.transformer(torch.tensor([request.token_ids])).logits[0, -1] / temperature
        kept_K = logits_V if num_kept is None else logits_V.topk(num_kept).values
        expected = logits_V[int(completion.token_ids[0])] - torch.logsumexp(kept_K, dim=0)
        assert completion.logprobs[0] == pytest.approx(float(expected), abs=1e-5)


@pytest.mark.slow
def test_the_order_of_submission_changes_nothing(policy: PolicyModel) -> None:
    sampler = sampler_of(policy, max_rows=5)
    requests = requests_of(Sampling(max_tokens=12), num=4, n=3)
    expected = generated(sampler, requests)
    shuffled = generated(sampler, [requests[i] for i in (3, 0, 2, 1)])
    assert ids_of(shuffled) == ids_of(expected)
    assert all(np.array_equal(shuffled[key].logprobs, row.logprobs) for key, row in expected.items())
    assert len({tuple(ids) for ids in ids_of(expected).values()}) == 12


@pytest.mark.slow
def test_a_seed_decides_what_a_sample_draws(policy: PolicyModel) -> None:
    sampler = sampler_of(policy)
    (request,) = requests_of(Sampling(max_tokens=20), num=1, n=2)
    first = ids_of(generated(sampler, [request]))
    assert ids_of(generated(sampler, [request])) == first
    assert ids_of(generated(sampler, [replace(request, seed=99)])) != first
    assert first["r0", 0] != first["r0", 1]
    assert row_stream(-5, 0).random() == row_stream(-5, 0).random() != row_stream(-5, 1).random()


@pytest.mark.slow
def test_rows_of_different_budgets_end_separately_without_affecting_others(policy: PolicyModel) -> None:
    long = requests_of(Sampling(max_tokens=24), num=6, n=2)
    expected = ids_of(generated(sampler_of(policy), long))
    budgets = [3, 24, 1, 17, 2, 24]
    mixed = [replace(row, sampling=Sampling(max_tokens=budget)) for row, budget in zip(long, budgets, strict=True)]
    completions = generated(sampler_of(policy), mixed)
    for request, budget in zip(mixed, budgets, strict=True):
        for sample in range(2):
            found, whole = completions[request.id, sample], expected[request.id, sample]
            assert found.token_ids.tolist() == whole[:budget]
            ended = found.token_ids[-1] == END
            assert found.finish == (FinishReason.STOP if ended else FinishReason.LENGTH)
            assert len(found.token_ids) == len(found.logprobs)
            assert found.version == 3


def make_end_likely(model: PolicyModel) -> None:
    """Give the end token a fixed, high logit: copy the row of the output layer that wins most often."""
    with torch.no_grad():
        head = model.head.linear
        head.weight[END] = head.weight[:END].mean(dim=0) + 0.3 * torch.ones(32)


@pytest.mark.slow
def test_the_end_token_is_kept_and_nothing_follows_it(llama: Path) -> None:
    model = model_of(llama)
    make_end_likely(model)
    completions = generated(sampler_of(model), requests_of(Sampling(max_tokens=40, temperature=2.0), num=2, n=8))
    ended = [completion for completion in completions.values() if completion.finish is FinishReason.STOP]
    assert ended
    assert all(completion.token_ids[-1] == END and END not in completion.token_ids[:-1] for completion in ended)


@pytest.mark.slow
def test_a_stop_string_ends_a_row_and_the_tokens_that_complete_it_stay(policy: PolicyModel) -> None:
    requests = requests_of(Sampling(max_tokens=30), num=3, n=4)
    free = generated(sampler_of(policy), requests)
    tokens = ByteTokens()
    key, start, target = next(
        (key, start, text)
        for key, completion in free.items()
        for start in range(3, len(completion.token_ids) - 3)
        if len(text := tokens.decode(completion.token_ids.tolist()[start : start + 3])) == 3 and text.isascii()
    )
    stopped = generated(
        sampler_of(policy), [replace(r, sampling=replace(r.sampling, stop=("never!", target))) for r in requests]
    )
    found = stopped[key]
    assert found.finish is FinishReason.STOP
    assert tokens.decode(found.token_ids.tolist()).endswith(target)
    assert len(found.token_ids) <= start + 3
    for other, completion in stopped.items():
        ids = completion.token_ids.tolist()
        assert ids == free[other].token_ids.tolist()[: len(ids)]


def test_each_prompt_is_computed_once_for_all_its_samples(policy: PolicyModel) -> None:
    sampler = sampler_of(policy)
    shapes: list[tuple[int, ...]] = []
    handle = policy.transformer.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    generated(sampler, requests_of(replace(GREEDY, max_tokens=5), num=3, n=8))
    handle.remove()
    assert shapes[0] == (3, 9)
    assert shapes[1] == (24, 1)


def test_rows_that_ended_leave_the_batch(policy: PolicyModel) -> None:
    sampler = sampler_of(policy)
    rows: list[int] = []
    requests = [
        replace(request, sampling=Sampling(max_tokens=4 * i + 2)) for i, request in enumerate(requests_of(GREEDY))
    ]
    handle = policy.transformer.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    generated(sampler, requests)
    handle.remove()
    assert rows[1] == 8
    assert rows[-1] <= 2
    assert rows[1:] == sorted(rows[1:], reverse=True)


def test_each_completion_is_yielded_when_it_ends_and_other_tasks_run_meanwhile(policy: PolicyModel) -> None:
    sampler = sampler_of(policy)
    requests = [
        replace(request, sampling=Sampling(max_tokens=10 * i + 1)) for i, request in enumerate(requests_of(GREEDY))
    ]
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def run() -> list[int]:
        other = asyncio.create_task(count())
        seen = [turns async for _ in sampler.generate(requests)]
        other.cancel()
        return seen

    seen = asyncio.run(run())
    assert seen[0] < seen[-1]
    assert seen[-1] >= 20


def test_generation_leaves_the_model_as_it_was(policy: PolicyModel) -> None:
    before = [parameter.detach().clone() for parameter in policy.parameters()]
    state = torch.get_rng_state()
    generated(sampler_of(policy), requests_of(Sampling(max_tokens=5)))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(policy.parameters(), before, strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled()
    assert all(parameter.grad is None for parameter in policy.parameters())


@pytest.mark.slow
def test_keys_and_values_are_freed_at_the_end_also_while_no_garbage_is_collected(policy: PolicyModel) -> None:
    gc.collect()
    gc.disable()
    try:
        generated(sampler_of(policy), requests_of(Sampling(max_tokens=5)))
        layers = [object_ for object_ in gc.get_objects() if type(object_) is SlotLayer]
    finally:
        gc.enable()
    assert [layer for layer in layers if layer.prompts is not None or layer.rows is not None] == []


def test_tables_of_rows_grow_to_no_more_tokens_than_the_longest_row_may_have(
    policy: PolicyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So many the plan counts."""
    seen: list[int] = []
    reserve_rows = SlotCache.reserve_rows

    def reserve(cache: SlotCache, *arguments: int) -> None:
        reserve_rows(cache, *arguments)
        seen.append(cache.row_slots[1])

    monkeypatch.setattr(SlotCache, "reserve_rows", reserve)
    generated(sampler_of(policy), requests_of(Sampling(temperature=0.0, max_tokens=100), num=1))
    assert max(seen) == 100


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(250, 7), (300, 1)])
def test_what_does_not_fit_the_window_is_refused_with_its_numbers(
    policy: PolicyModel, num_prompt: int, max_tokens: int
) -> None:
    sampler = sampler_of(policy)
    request = GenerateRequest("long/7", (65,) * num_prompt, Sampling(max_tokens=max_tokens), 1, 0)
    with pytest.raises(ConfigError, match=rf"'long/7' has {num_prompt} .* {num_prompt + max_tokens}, .* holds 256"):
        generated(sampler, [request])


def test_a_prompt_of_another_vocabulary_is_refused(policy: PolicyModel) -> None:
    sampler = sampler_of(policy)
    with pytest.raises(WorkerError, match=rf"'r' holds the token id 999.*vocabulary has {VOCABULARY}"):
        generated(sampler, [GenerateRequest("r", (5, 999), GREEDY, 1, 0)])
    with pytest.raises(WorkerError, match=r"holds the token id -3, but"):
        generated(sampler, [GenerateRequest("r", (5, -3, 7), GREEDY, 1, 0)])
    with pytest.raises(WorkerError, match="'r' has 0 prompt tokens"):
        generated(sampler, [GenerateRequest("r", (), GREEDY, 1, 0)])


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(max_tokens=5), Sampling(max_tokens=5, top_p=0.5)])
def test_weights_that_are_no_numbers_are_named(llama: Path, sampling: Sampling) -> None:
    model = model_of(llama)
    with torch.no_grad():
        model.head.linear.weight[7, 3] = float("nan")
    with pytest.raises(WorkerError, match="request 'r0', sample 0: the logits after 5 tokens are not finite"):
        generated(sampler_of(model), requests_of(sampling, num=2))


def test_a_model_with_recurrent_state_is_refused(llama: Path) -> None:
    model = model_of(llama)
    model.transformer.config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(ConfigError, match=r"linear_attention.*another rollout backend"):
        sampler_of(model)
