"""SmolLM2-135M-Instruct in float32: exact micro-batches, and a sampler that agrees with the trainer."""

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rlcore.algo.aggregation import row_weights
from rlcore.algo.loss import clip
from rlcore.config import AlgoConfig, EngineConfig, ModelConfig
from rlcore.contracts.tokens import Tokens
from rlcore.data.batch import collate, micro_batches
from rlcore.data.tokenizer import TemplateTokens, load_tokens
from rlcore.engines.hf import TrainEngine
from rlcore.engines.hf.sample.sampler import EmbeddedSampler
from rlcore.engines.hf.train.policy_loss import PolicyLoss
from rlcore.types import (
    Batch,
    Completion,
    GenerateRequest,
    Prompt,
    Reward,
    Sampling,
    ScoredTrajectory,
    Trajectory,
    TrajectoryId,
)

pytestmark = [pytest.mark.real, pytest.mark.timeout(1200)]

MODEL = Path(os.environ.get("RLCORE_SMOLLM2") or Path(__file__).parents[2] / ".models" / "smollm2-135m-instruct")
QUESTIONS = ["What is 3 + 4?", "Name a colour.", "Say hello to my dog Bello.", "2 + 2 ="]


@pytest.fixture(scope="module")
def tokens() -> Tokens:
    if not MODEL.is_dir():
        pytest.skip(f"no model at {MODEL}: python examples/arithmetic/get_model.py {MODEL}")
    return load_tokens(ModelConfig(path=str(MODEL)), "Answer briefly.")


@pytest.fixture(scope="module")
def engine(tokens: Tokens) -> TrainEngine:
    return engine_of(4096)


def engine_of(micro_batch_tokens: int) -> TrainEngine:
    config = EngineConfig(lr=1e-6, micro_batch_tokens=micro_batch_tokens)
    return TrainEngine("causal_lm", ModelConfig(path=str(MODEL)), config, PolicyLoss(clip, AlgoConfig()))


def generated(engine: TrainEngine, tokens: Tokens, sampling: Sampling, n: int) -> list[list[Completion]]:
    """The samples of each question."""
    requests = [
        GenerateRequest(str(i), tokens.encode_prompt([{"role": "user", "content": question}]), sampling, n, seed=i)
        for i, question in enumerate(QUESTIONS)
    ]
    sampler = EmbeddedSampler(engine.policy, tokens, max_rows=64, device=torch.device("cpu"))

    async def run() -> list[Completion]:
        return [completion async for completion in sampler.generate(requests)]

    completions = sorted(asyncio.run(run()), key=lambda completion: (completion.request_id, completion.sample))
    return [completions[start : start + n] for start in range(0, len(completions), n)]


@pytest.fixture(scope="module")
def batch(engine: TrainEngine, tokens: Tokens) -> Batch:
    """Two sampled responses to each question, with made-up advantages."""
    groups = []
    for question, samples in zip(QUESTIONS, generated(engine, tokens, Sampling(max_tokens=12), 2), strict=True):
        prompt = Prompt(question, ({"role": "user", "content": question},), None, "q")
        prompt_ids = np.array(tokens.encode_prompt(prompt.messages), dtype=np.int32)
        rows = []
        for sample in samples:
            token_ids = np.concatenate([prompt_ids, sample.token_ids])
            trajectory = Trajectory(
                id=TrajectoryId(question, 0, sample.sample),
                prompt=prompt,
                token_ids=token_ids,
                loss_mask=np.arange(len(token_ids)) >= len(prompt_ids),
                logprobs=np.concatenate([np.zeros(len(prompt_ids), dtype=np.float32), sample.logprobs]),
                completion="",
                finish=sample.finish,
                versions=((len(prompt_ids), 0),),
            )
            rows.append(ScoredTrajectory(trajectory, Reward(0.0)))
        groups.append(rows)
    batch = collate(groups, tokens.pad_id)
    advantages_B = np.random.default_rng(0).standard_normal(len(batch)).astype(np.float32)
    weights_B = row_weights("token_mean", batch.num_sampled_B, batch.sample_B)
    return replace(batch, advantages_B=advantages_B, weights_B=weights_B)


def gradient_of(engine: TrainEngine, batch: Batch) -> torch.Tensor:
    """All gradients of an update as one vector; the weights stay as they are."""
    seen: list[torch.Tensor] = []
    engine._optimizer.step = lambda lr: seen.extend(  # type: ignore[method-assign]
        parameter.grad.flatten().clone() for parameter in engine._optimizer.parameters if parameter.grad is not None
    )
    engine.update(batch)
    return torch.cat(seen)


def test_the_prompt_and_its_end_are_smollm2s_own(tokens: Tokens) -> None:
    assert isinstance(tokens, TemplateTokens)
    assert tokens.eos_ids == {2}
    ids = tokens.encode_prompt([{"role": "user", "content": "hi"}])
    assert ids[0] == 1
    assert tokens.decode(ids) == "system\nAnswer briefly.\nuser\nhi\nassistant\n"


def test_sampler_and_trainer_agree_on_every_logprob(engine: TrainEngine, batch: Batch) -> None:
    arrays = batch.tokens
    difference = (engine.logprobs(batch) - arrays.rollout_logprobs_BT)[arrays.loss_mask_BT]
    assert len(difference) > 16
    assert np.abs(difference).max() < 1e-3
    assert np.exp(difference).mean() == pytest.approx(1.0, abs=1e-4)


def test_any_split_into_micro_batches_gives_the_same_gradient(engine: TrainEngine, batch: Batch) -> None:
    """Within 1e-5, and within 5e-5 row by row.

    The multiplications of a single short row round differently from those of many. Measured: 1.5e-5 for single rows,
    9e-7 for more; the float32 gradient of the whole mini-batch is itself 4.2e-5 away from that in float64.
    """
    whole = gradient_of(engine, batch)
    longest = int(batch.lengths_B.max())
    for rows, allowed in ((1, 5e-5), (2, 1e-5), (4, 1e-5)):
        assert len(micro_batches(batch.lengths_B, rows * longest)) > 1
        split = gradient_of(engine_of(rows * longest), batch)
        assert float((split - whole).norm() / whole.norm()) < allowed


def test_greedy_tokens_are_those_of_transformers(engine: TrainEngine, tokens: Tokens) -> None:
    greedy = generated(engine, tokens, Sampling(temperature=0.0, max_tokens=12), 1)
    for question, (completion,) in zip(QUESTIONS, greedy, strict=True):
        prompt_BT = torch.tensor([tokens.encode_prompt([{"role": "user", "content": question}])])
        theirs_BT = engine.policy.transformer.generate(
            prompt_BT, attention_mask=torch.ones_like(prompt_BT), max_new_tokens=12, do_sample=False
        )
        assert completion.token_ids.tolist() == theirs_BT[0, prompt_BT.shape[1] :].tolist()
