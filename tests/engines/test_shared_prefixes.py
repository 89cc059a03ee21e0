"""The prompt of a group, computed once: the same log-probs and the same gradients as row by row."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlcore.algo.aggregation import row_weights
from rlcore.algo.loss import clip
from rlcore.config import AlgoConfig, EngineConfig, LoraConfig, ModelConfig
from rlcore.contracts.actor import ACTOR, ActorWorker
from rlcore.contracts.model_files import model_shape, num_parameters
from rlcore.contracts.requests import ModelShape, WorkerRequest
from rlcore.data.batch import collate, shared_micro_batches, shared_prefixes
from rlcore.engines.hf import TrainEngine
from rlcore.engines.hf.train.policy_loss import PolicyLoss
from rlcore.errors import ConfigError
from rlcore.plan import Facts, WorkerPlan
from rlcore.plan.prefixes import plan_shared_prefixes
from rlcore.testing.tiny import END, VOCABULARY, random_batch, write_tiny_model
from rlcore.types import (
    Batch,
    FinishReason,
    Prompt,
    Reward,
    ScoredTrajectory,
    SharedPrefix,
    Trajectory,
    TrajectoryId,
)

torch.set_num_threads(1)

ALGO = AlgoConfig(entropy_coef=0.1)
WAYS = (SharedPrefix.TREE, SharedPrefix.CACHE)
# GPT-J brings attention code, which transformers' interface for attention does not reach.
ARCHITECTURES = {
    "Llama": {"num_key_value_heads": 2},
    "Qwen3": {"num_key_value_heads": 1, "head_dim": 16},
    "GPTNeoX": {},
    "Gemma": {"num_key_value_heads": 1, "head_dim": 8},
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "llama", num_key_value_heads=2)


def engine_of(
    path: Path,
    shared: SharedPrefix,
    *,
    lora: bool = False,
    kind: str = "causal_lm",
    attention: Any = "sdpa",
    **settings: object,
) -> TrainEngine:
    config = EngineConfig(
        **{"dtype": "float64", "micro_batch_tokens": 60, "lora": LoraConfig(enabled=lora, rank=2), **settings}  # type: ignore[arg-type]
    )
    model = ModelConfig(path=str(path), attention=attention)
    return TrainEngine(kind, model, config, PolicyLoss(clip, ALGO), shared_prefix=shared)


def gradients_of(engine: TrainEngine, batch: Batch) -> list[Tensor]:
    """The gradients an update would use."""
    seen: list[Tensor] = []
    engine._optimizer.step = lambda lr: seen.extend(  # type: ignore[method-assign]
        torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for parameter in engine._optimizer.parameters
    )
    engine.update(batch)
    return seen


def relative_difference(ones: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    ones_flat, others_flat = (torch.cat([row.flatten() for row in some]) for some in (ones, others))
    return float((ones_flat - others_flat).norm() / others_flat.norm())


def conversations() -> Batch:
    """Two groups whose rows have several turns: what the policy sampled stands between what it did not; one row of the
    first group has a prompt that differs early, and one row has no sampled token at all."""
    rng = np.random.default_rng(3)
    groups = []
    for group, prompt_length in enumerate((9, 4)):
        prompt = Prompt(f"p/{group}", (), None, "p")
        shared = rng.integers(0, END, prompt_length)
        rows = []
        for sample in range(3):
            start = shared.copy()
            if (group, sample) == (0, 2):
                start[5] = (start[5] + 1) % END
            turns = [rng.integers(0, END, rng.integers(1, 6)) for _ in range(5)]
            token_ids = np.concatenate([start, *turns]).astype(np.int32)
            turn_T = np.concatenate([np.full(len(start), -1), *(np.full(len(t), i) for i, t in enumerate(turns))])
            mask = (turn_T >= 0) & (turn_T % 2 == 0) & ((group, sample) != (1, 1))
            trajectory = Trajectory(
                id=TrajectoryId(prompt.id, 0, sample),
                prompt=prompt,
                token_ids=token_ids,
                loss_mask=mask,
                logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
                completion="",
                finish=FinishReason.STOP,
                versions=((len(start), 0),),
            )
            rows.append(ScoredTrajectory(trajectory, Reward(score=float(rng.random()))))
        groups.append(rows)
    batch = collate(groups, END)
    return replace(
        batch,
        advantages_B=rng.standard_normal(len(batch)).astype(np.float32),
        weights_B=row_weights("token_mean", batch.num_sampled_B, batch.sample_B),
    )


@pytest.mark.slow
@pytest.mark.parametrize("shared", WAYS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_gradients_and_logprobs_equal_those_of_rows_computed_one_by_one(
    tmp_path: Path, architecture: str, shared: SharedPrefix
) -> None:
    path = write_tiny_model(tmp_path, architecture, **ARCHITECTURES[architecture])
    plain, sharing = engine_of(path, SharedPrefix.NONE), engine_of(path, shared)
    batch = random_batch(num_groups=3, samples=4)
    np.testing.assert_allclose(sharing.logprobs(batch), plain.logprobs(batch), rtol=0, atol=1e-6)
    assert (
        relative_difference(gradients_of(sharing, batch), gradients_of(plain, batch)) < 1e-6
    )  # norms of some models run in float32


@pytest.mark.slow
@pytest.mark.parametrize("shared", WAYS)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("lora", [False, True])
def test_every_pair_of_training_and_way_is_exact_or_refused(
    llama: Path, lora: bool, checkpointing: bool, shared: SharedPrefix
) -> None:
    settings = {"dtype": "float32", "gradient_checkpointing": checkpointing}
    if checkpointing and shared is SharedPrefix.CACHE:
        with pytest.raises(ConfigError, match=r"actor\.shared_prefix=cache: .*gradient_checkpointing.*choose tree"):
            engine_of(llama, shared, lora=lora, **settings)
        return
    batch = random_batch(num_groups=3, samples=4)
    plain = gradients_of(engine_of(llama, SharedPrefix.NONE, lora=lora, **settings), batch)
    sharing = gradients_of(engine_of(llama, shared, lora=lora, **settings), batch)
    assert relative_difference(sharing, plain) < 1e-5


@pytest.mark.parametrize("budget", [15, 60, 10_000])
@pytest.mark.parametrize("shared", WAYS)
def test_conversations_of_several_turns_are_exact_under_any_split(
    llama: Path, shared: SharedPrefix, budget: int
) -> None:
    batch = conversations()
    plain = gradients_of(engine_of(llama, SharedPrefix.NONE, micro_batch_tokens=10_000), batch)
    sharing = gradients_of(engine_of(llama, shared, micro_batch_tokens=budget), batch)
    assert relative_difference(sharing, plain) < 1e-6  # norms of some models run in float32


@pytest.mark.slow
def test_weights_after_three_updates_differ_by_the_rounding_of_float32(llama: Path) -> None:
    """AdamW's first steps divide gradients by their own size, so where they are noise, noise moves weights."""
    weights = {}
    for way in (SharedPrefix.NONE, SharedPrefix.TREE):
        engine = engine_of(llama, way, dtype="float32", lr=1e-3)
        before = [parameter.detach().clone() for parameter in engine.model.parameters()]
        for seed in range(3):
            engine.update(random_batch(num_groups=3, samples=4, seed=seed))
        weights[way] = [parameter.detach() for parameter in engine.model.parameters()]
    pairs = zip(weights[SharedPrefix.NONE], weights[SharedPrefix.TREE], strict=True)
    assert max(float((left - right).abs().max()) for left, right in pairs) < 2e-5
    moved = zip(before, weights[SharedPrefix.TREE], strict=True)
    assert max(float((left - right).abs().max()) for left, right in moved) > 2.5e-3
    assert relative_difference(weights[SharedPrefix.TREE], weights[SharedPrefix.NONE]) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("shared", WAYS)
@pytest.mark.parametrize("samples", [1, 2])
def test_groups_of_few_rows_and_rows_that_predict_nothing_are_exact(
    llama: Path, samples: int, shared: SharedPrefix
) -> None:
    batch = random_batch(num_groups=3, samples=samples)
    tokens = batch.tokens
    silent = replace(tokens, loss_mask_BT=tokens.loss_mask_BT & (np.arange(len(batch)) > 0)[:, None])
    batch = replace(batch, tokens=silent, num_sampled_B=np.count_nonzero(silent.loss_mask_BT, axis=1))
    settings = {"micro_batch_tokens": 1}  # a micro-batch for each row: one of them predicts nothing
    plain, sharing = (gradients_of(engine_of(llama, way, **settings), batch) for way in (SharedPrefix.NONE, shared))
    assert relative_difference(sharing, plain) < 1e-6


@pytest.mark.parametrize("shared", WAYS)
def test_values_are_those_of_rows_computed_one_by_one(llama: Path, shared: SharedPrefix) -> None:
    engines = [engine_of(llama, way, kind="value") for way in (SharedPrefix.NONE, shared)]
    for engine in engines:
        with torch.no_grad():
            engine.model.value_head.weight.copy_(torch.linspace(-1, 1, 32)[None])
    plain_BT, sharing_BT = (engine.values(conversations()) for engine in engines)
    assert np.abs(plain_BT).max() > 0.1
    np.testing.assert_allclose(sharing_BT, plain_BT, rtol=0, atol=1e-6)


def test_a_model_whose_attention_does_not_know_the_tree_is_refused_by_name(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path, "Bloom", n_head=4, n_layer=1)
    model, config = ModelConfig(path=str(path), attention="eager"), EngineConfig()
    with pytest.raises(ConfigError, match=r"actor\.shared_prefix=tree: BloomForCausalLM cannot"):
        TrainEngine("causal_lm", model, config, None, shared_prefix=SharedPrefix.TREE)
    TrainEngine("causal_lm", model, config, None, shared_prefix=SharedPrefix.CACHE)


@pytest.mark.parametrize(
    ("architecture", "shared", "settings", "found"),
    [
        ("Mistral", SharedPrefix.TREE, {"sliding_window": 4}, "sliding_window=4 "),
        ("Mistral", SharedPrefix.CACHE, {"sliding_window": 100}, "a sliding window"),
        ("Gemma2", SharedPrefix.TREE, {"head_dim": 8, "layer_types": ["full_attention"] * 2}, r"softcap=50\.0"),
    ],
)
def test_attention_with_a_window_or_a_soft_cap_is_refused_by_name_although_short_rows_would_be_right(
    tmp_path: Path, architecture: str, shared: SharedPrefix, settings: dict[str, object], found: str
) -> None:
    path = write_tiny_model(tmp_path, architecture, num_key_value_heads=2, **settings)
    attention = "eager" if architecture == "Gemma2" else "sdpa"
    with pytest.raises(ConfigError, match=rf"actor\.shared_prefix={shared}: {architecture}ForCausalLM .*{found}.*none"):
        engine_of(path, shared, attention=attention)


@pytest.mark.slow
def test_a_window_shorter_than_the_prompt_is_computed_row_by_row(tmp_path: Path) -> None:
    batch = conversations()
    assert int(shared_prefixes(batch).max()) == 5
    plain, windowed = (
        gradients_of(
            engine_of(write_tiny_model(tmp_path / name, "Mistral", num_key_value_heads=2, **window), SharedPrefix.NONE),
            batch,
        )
        for name, window in (("full", {"sliding_window": None}), ("windowed", {"sliding_window": 4}))
    )
    assert relative_difference(windowed, plain) > 1e-3, "the window counts, so ignoring it gives other gradients"
    sharing = gradients_of(engine_of(tmp_path / "full", SharedPrefix.TREE), batch)
    assert relative_difference(sharing, plain) < 1e-6


@pytest.mark.parametrize(
    ("architecture", "attention", "settings", "way"),
    [
        ("GPTJ", "eager", {"rotary_dim": 4}, SharedPrefix.CACHE),
        ("GPT2", "sdpa", {}, SharedPrefix.TREE),
    ],
)
def test_the_plan_shares_prompts_of_models_whose_config_json_has_other_names_and_that_way_is_exact(
    tmp_path: Path, architecture: str, attention: str, settings: dict[str, object], way: SharedPrefix
) -> None:
    sizes = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_inner": 48, "max_position_embeddings": 32}
    path = write_tiny_model(tmp_path, architecture, **sizes, **settings)
    shape = ModelShape(architecture.lower(), 2, 32, 48, 32, VOCABULARY, full_attention=True, query_size=32, heads=4)
    assert model_shape(path) == shape
    counted = num_parameters(path)
    (path / "model.safetensors").rename(tmp_path / "away")
    assert num_parameters(path) == pytest.approx(counted, rel=0.1), "by config.json, without positions and norms"
    (tmp_path / "away").rename(path / "model.safetensors")
    request = WorkerRequest(ACTOR, "hf", engine=EngineConfig(), shared_prefix="planned")
    workers, notes = plan_shared_prefixes(
        [WorkerPlan(request, ActorWorker, "", "")], Facts(shape=model_shape(path)), attention
    )
    assert (workers[0].shared_prefix, notes) == (way, ())
    batch = random_batch(num_groups=2, samples=3)
    plain, sharing = (
        gradients_of(engine_of(path, value, attention=attention, dtype="float32"), batch)
        for value in (SharedPrefix.NONE, way)
    )
    assert relative_difference(sharing, plain) < 1e-6


def ended_at_once() -> Batch:
    """Two groups whose every response is the end token alone."""
    rng, groups = np.random.default_rng(5), []
    for group, length in enumerate((9, 4)):
        token_ids = np.append(rng.integers(0, END, length), END).astype(np.int32)
        mask, prompt = token_ids == END, Prompt(f"p/{group}", (), None, "p")
        arguments = {
            "token_ids": token_ids,
            "loss_mask": mask,
            "logprobs": np.where(mask, -1.0, 0.0).astype(np.float32),
        }
        ends = {"completion": "", "finish": FinishReason.STOP, "versions": ((length, 0),)}
        ids = [TrajectoryId(prompt.id, 0, sample) for sample in range(2)]
        groups.append(
            [ScoredTrajectory(Trajectory(id=id_, prompt=prompt, **arguments, **ends), Reward(0.0)) for id_ in ids]
        )  # type: ignore[arg-type]
    batch = collate(groups, pad_id=END)
    return replace(
        batch,
        advantages_B=np.array([1.0, 0.5, -0.3, 2.0], dtype=np.float32),
        weights_B=row_weights("token_mean", batch.num_sampled_B, batch.sample_B),
    )


@pytest.mark.parametrize("shared", [SharedPrefix.TREE, SharedPrefix.CACHE])
def test_responses_of_the_end_token_alone_are_trained(llama: Path, shared: SharedPrefix) -> None:
    batch = ended_at_once()
    assert batch.num_sampled_B.tolist() == [1] * 4
    plain, sharing = (gradients_of(engine_of(llama, way), batch) for way in (SharedPrefix.NONE, shared))
    assert float(torch.cat([text.flatten() for text in plain]).norm()) > 1e-3
    assert relative_difference(sharing, plain) < 1e-6


def test_the_attention_of_the_model_is_its_own_again_after_an_update(llama: Path) -> None:
    engine = engine_of(llama, SharedPrefix.TREE)
    engine.update(random_batch())
    assert engine.model.transformer.config._attn_implementation == "sdpa"


def test_prefixes_end_where_rows_differ_or_were_sampled() -> None:
    batch = conversations()
    # the third row differs at position 5; the row without a sampled token does not end its group's prefix
    assert shared_prefixes(batch).tolist() == [5, 5, 5, 4, 4, 4]


@pytest.mark.parametrize("budget", [1, 30, 64, 10_000])
def test_micro_batches_hold_every_row_once_and_keep_to_the_budget(budget: int) -> None:
    batch = random_batch(num_groups=6, samples=5)
    prefix_B = shared_prefixes(batch)
    suffix_B = batch.lengths_B - prefix_B - 1  # every row ends with a sampled token, from which nothing is predicted
    parts = shared_micro_batches(batch, budget)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(batch)))
    for rows in parts:
        groups = sorted(set(batch.group_B[rows].tolist()))
        prefixes = [int(prefix_B[batch.group_B == group][0]) for group in groups]
        cost = len(groups) * max(prefixes) + len(rows) * int(suffix_B[rows].max())
        assert cost <= budget or len(rows) == 1
    if budget == 10_000:
        assert len(parts) == 1


@pytest.mark.parametrize("shared", SharedPrefix)
def test_rows_without_a_common_token_and_without_a_sampled_one_have_no_log_probs(
    llama: Path, shared: SharedPrefix
) -> None:
    batch = random_batch(num_groups=1, samples=2)
    ids_BT = batch.tokens.token_ids_BT.copy()
    ids_BT[:, 0] = 1, 2
    nothing = replace(batch.tokens, token_ids_BT=ids_BT, loss_mask_BT=np.zeros_like(batch.tokens.loss_mask_BT))
    found_BT = engine_of(llama, shared).logprobs(replace(batch, tokens=nothing))
    assert not found_BT.any()
