"""Warm-up: teach the model the form of a response by imitation, on the public training engine.

    python examples/char_count/sft.py .models/smollm2-135m-instruct runs/char_count/data runs/char_count/sft

Minimises -log p of the tokens of `response` after the chat template's prompt, each token counting the same. The result,
`<target>/model`, is an ordinary model directory with its tokenizer, for `model.path` of the configurations here.
"""

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the process without a traceback, also while it imports

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from rlcore import (
    Batch,
    FinishReason,
    Prompt,
    Reward,
    ScoredTrajectory,
    TrainEngine,
    Trajectory,
    TrajectoryId,
    collate,
    load_tokens,
)
from rlcore.algo.aggregation import row_weights
from rlcore.config import EngineConfig, ModelConfig
from rlcore.contracts.tokens import Tokens
from rlcore.engines.hf import LossTerms, MicroBatch, Predictions


def imitation(micro: MicroBatch, predictions: Predictions) -> LossTerms:
    """The loss of a token is minus its log-prob."""
    return LossTerms(-predictions.scores_BT)


def batch_of(rows: Sequence[dict[str, str]], tokens: Tokens, encode: Callable[[str], list[int]]) -> Batch:
    """Rows as a batch in which the response has a loss and every token weighs the same."""
    groups = []
    for index, row in enumerate(rows):
        message = {"role": "user", "content": row["prompt"]}
        prompt = Prompt(str(index), (message,), row["answer"], "sft")
        prompt_ids, response_ids = tokens.encode_prompt([message]), encode(row["response"])
        mask = np.arange(len(prompt_ids) + len(response_ids)) >= len(prompt_ids)
        trajectory = Trajectory(
            id=TrajectoryId(prompt.id, 0, 0),
            prompt=prompt,
            token_ids=np.array([*prompt_ids, *response_ids], dtype=np.int32),
            loss_mask=mask,
            logprobs=np.zeros(len(mask), dtype=np.float32),
            completion=row["response"],
            finish=FinishReason.STOP,
            versions=(),
        )
        groups.append([ScoredTrajectory(trajectory, Reward(0.0))])
    batch = collate(groups, tokens.pad_id)
    return replace(batch, weights_B=row_weights("token_mean", batch.num_sampled_B, batch.sample_B))


class Encode:
    """A response as the model would have sampled it: its tokens, and the one that ends a turn."""

    def __init__(self, model: str) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(model)

    def __call__(self, response: str) -> list[int]:
        return [*self._tokenizer.encode(response, add_special_tokens=False), self._tokenizer.eos_token_id]


def main() -> None:
    """Train, print the loss, write the model."""
    parser = argparse.ArgumentParser(description="Teach the form of a response by imitation.")
    parser.add_argument("model", help="model directory or hub name")
    parser.add_argument("data", type=Path, help="directory with train.jsonl")
    parser.add_argument("target", type=Path, help="directory for model/")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--batch", type=int, default=256, help="rows of an optimizer step")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--max-updates", type=int, default=0, help="stop after this many; 0: all epochs")
    parser.add_argument("--micro-batch-tokens", type=int, default=8192)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows = [json.loads(line) for line in (options.data / "train.jsonl").read_text().splitlines()]
    source = ModelConfig(path=options.model)
    tokens, encode = load_tokens(source, ""), Encode(options.model)
    settings = EngineConfig(lr=options.lr, dtype=options.dtype, micro_batch_tokens=options.micro_batch_tokens)
    engine = TrainEngine("causal_lm", source, settings, imitation, name="sft", loss_name="loss", device=options.device)
    draw, began, done = random.Random(options.seed), time.monotonic(), 0
    per_epoch = max(1, len(rows) // options.batch)
    updates = options.max_updates or options.epochs * per_epoch
    while done < updates:
        if done % per_epoch == 0:
            draw.shuffle(rows)
        start = done % per_epoch * options.batch
        metrics = engine.update(batch_of(rows[start : start + options.batch], tokens, encode))
        done += 1
        seconds = time.monotonic() - began
        print(f"update {done}/{updates}  loss {metrics['loss']:.4f}  {seconds:.0f} s", flush=True)
    engine.save(options.target)
    tokens.save(options.target / "model")
    print(f"sft: wrote {options.target / 'model'}")


if __name__ == "__main__":
    main()
