"""Tiny random models and batches, for tests of code that computes with a transformers model.

They are for `model.tokenizer=bytes`: the vocabulary is large enough for `ByteTokens`, and the models have its
end-of-turn id.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rlcore.algo.aggregation import Mode, row_weights
from rlcore.data.batch import collate
from rlcore.types import Batch, FinishReason, Prompt, Reward, ScoredTrajectory, Trajectory, TrajectoryId

VOCABULARY = 264
END = 256
"""The end-of-turn id of `ByteTokens`."""


def write_tiny_model(directory: Path, architecture: str = "Llama", seed: int = 0, **settings: Any) -> Path:
    """Write a random float32 causal language model with transformers' '<architecture>Config'; returns the directory.

    By default it has two layers, hidden size 32, four heads, a window of 256 tokens and untied weights. `settings` of
    its configuration replace these.
    """
    import torch
    import transformers

    classes: Any = transformers
    classes.utils.logging.disable_progress_bar()
    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
        "bos_token_id": END,
        "eos_token_id": END,
        "pad_token_id": END,
        "tie_word_embeddings": False,
    }
    config = getattr(classes, f"{architecture}Config")(**{**common, **settings})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = classes.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():  # larger than usual: distributions that are not nearly uniform
            for parameter in model.parameters():
                parameter.mul_(4.0 if parameter.ndim > 1 else 1.0)
    model.save_pretrained(directory)
    return directory


def write_tiny_classifier(
    directory: Path,
    architecture: str = "Llama",
    labels: int = 1,
    seed: int = 0,
    num_heads: int = 4,
    of: Literal["Sequence", "Token"] = "Sequence",
    key_heads: int = 0,
    hidden_size: int = 32,
) -> Path:
    """Write a random float32 classifier of sequences or tokens for byte tokens; returns the directory.

    One label is a scalar. `key_heads`: heads of keys; 0 for as many as `num_heads`. The least size of a head that
    every engine computes on a CPU is 32.
    """
    import torch
    import transformers

    classes: Any = transformers
    classes.utils.logging.disable_progress_bar()
    config = getattr(classes, f"{architecture}Config")(
        vocab_size=VOCABULARY,
        hidden_size=hidden_size,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=num_heads,
        num_key_value_heads=key_heads or num_heads,
        max_position_embeddings=512,
        pad_token_id=END,
        bos_token_id=END,
        eos_token_id=END,
        num_labels=labels,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(classes, f"AutoModelFor{of}Classification").from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(4.0 if parameter.ndim > 1 else 1.0)
    model.save_pretrained(directory)
    return directory


def random_groups(
    num_groups: int = 4, samples: int = 2, seed: int = 0, max_prompt: int = 12, max_sampled: int = 10
) -> list[list[ScoredTrajectory]]:
    """Groups of scored trajectories with random tokens, lengths, recorded log-probs and rewards."""
    rng = np.random.default_rng(seed)
    groups = []
    for group in range(num_groups):
        prompt = Prompt(f"p/{group}", ({"role": "user", "content": "?"},), None, "p")
        prompt_ids = rng.integers(0, END, rng.integers(1, max_prompt + 1))
        rows = []
        for sample in range(samples):
            sampled = rng.integers(0, VOCABULARY, rng.integers(1, max_sampled + 1))
            token_ids = np.concatenate([prompt_ids, sampled]).astype(np.int32)
            mask = np.arange(len(token_ids)) >= len(prompt_ids)
            trajectory = Trajectory(
                id=TrajectoryId(prompt.id, 0, sample),
                prompt=prompt,
                token_ids=token_ids,
                loss_mask=mask,
                logprobs=np.where(mask, -rng.random(len(token_ids)), 0).astype(np.float32),
                completion="",
                finish=FinishReason.STOP,
                versions=((len(prompt_ids), 0),),
            )
            rows.append(ScoredTrajectory(trajectory, Reward(score=float(rng.random()))))
        groups.append(rows)
    return groups


def random_batch(
    num_groups: int = 4,
    samples: int = 2,
    seed: int = 0,
    aggregation: Mode = "token_mean",
    advantages: Sequence[float] | None = None,
) -> Batch:
    """A batch that is ready for an update, with the weights of `aggregation`; advantages are random by default."""
    batch = collate(random_groups(num_groups, samples, seed), pad_id=END)
    drawn_B = np.random.default_rng(seed + 1).standard_normal(len(batch))
    return replace(
        batch,
        advantages_B=np.asarray(drawn_B if advantages is None else advantages, dtype=np.float32),
        weights_B=row_weights(aggregation, batch.num_sampled_B, batch.sample_B),
    )


def batch_of_rows(groups: Sequence[Sequence[Sequence[int]]], seed: int = 0) -> Batch:
    """A batch of rows with these token ids, ready for an update. All tokens of a row except the first were sampled."""
    rng = np.random.default_rng(seed)
    scored = []
    for group, rows in enumerate(groups):
        prompt = Prompt(f"p/{group}", (), None, "p")
        trajectories = [
            Trajectory(
                id=TrajectoryId(prompt.id, 0, sample),
                prompt=prompt,
                token_ids=np.array(row, dtype=np.int32),
                loss_mask=np.arange(len(row)) > 0,
                logprobs=np.where(np.arange(len(row)) > 0, -1.0, 0.0).astype(np.float32),
                completion="",
                finish=FinishReason.STOP,
                versions=((1, 0),),
            )
            for sample, row in enumerate(rows)
        ]
        scored.append([ScoredTrajectory(trajectory, Reward(score=float(rng.random()))) for trajectory in trajectories])
    batch = collate(scored, pad_id=END)
    return replace(
        batch,
        advantages_B=rng.standard_normal(len(batch)).astype(np.float32),
        weights_B=row_weights("token_mean", batch.num_sampled_B, batch.sample_B),
    )


def random_conversations(rng: np.random.Generator, rows: int = 6, turns: int = 4, longest: int = 12) -> list[list[int]]:
    """Token ids of a group's rows that share some turns.

    Some rows are equal, some are prefixes of others, and one in ten shares nothing with the rest.
    """
    written: dict[tuple[int, ...], list[int]] = {}
    result = []
    for _ in range(rows):
        tokens, path = [int(rng.integers(1, 9))] if rng.random() < 0.1 else [9], tuple[int, ...]()
        for _ in range(int(rng.integers(0, turns + 1))):
            path = (*path, int(rng.integers(0, 2)))
            drawn = rng.integers(0, 9, rng.integers(1, longest + 1)).tolist()
            tokens += written.setdefault((tokens[0], *path), drawn)
        result.append([*tokens, 0])
    return result
