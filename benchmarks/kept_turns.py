"""Turns of conversations on the embedded rollout, with the keys and values of earlier turns and without, in turns.

    .venv/bin/python benchmarks/kept_turns.py --model DIRECTORY [--turns 4 10] [--rounds 3]

Without them every turn computes the whole conversation again. Prints one JSON line on stdout: seconds of a round, per
number of turns, and the ratio of the medians.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from measure import emit, machine, say, summary

from rlcore.config import ModelConfig
from rlcore.data.tokenizer import ByteTokens
from rlcore.engines.hf.sample.sampler import EmbeddedSampler
from rlcore.engines.hf.train.model import ModelKind, PolicyModel, load_model
from rlcore.testing.tiny import write_tiny_model
from rlcore.types import GenerateRequest, Sampling

PROMPT, SAMPLED, ANSWER = 150, 30, 20
"""Tokens of a prompt, the most of a turn, and those of a tool's answer."""
WAYS = {"kept": 2**30, "again": 0}


async def conversations(sampler: EmbeddedSampler, number: int, turns: int) -> float:
    """Seconds for that many conversations, whose turns begin together."""
    texts = [list(range(100 + index, 100 + index + PROMPT)) for index in range(number)]
    began = time.perf_counter()
    for turn in range(turns):
        requests = [
            GenerateRequest(
                f"{index}/{turn}", tuple(ids), Sampling(max_tokens=SAMPLED), 1, turn, conversation=f"{index}"
            )
            for index, ids in enumerate(texts)
        ]
        found = {completion.request_id: completion async for completion in sampler.generate(requests)}
        for index, ids in enumerate(texts):
            ids += [*found[f"{index}/{turn}"].token_ids.tolist(), *range(50, 50 + ANSWER)]
    return time.perf_counter() - began


def measured(model: PolicyModel, number: int, turns: int, rounds: int) -> dict[str, Any]:
    """The seconds of each way, and their ratio."""
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for index in range(rounds):
        for way, kept in WAYS.items():
            sampler = EmbeddedSampler(
                model, ByteTokens(), max_rows=number, device=torch.device("cpu"), cached_tokens=kept
            )
            seconds[way].append(asyncio.run(conversations(sampler, number, turns)))
            say(f"kept_turns: {turns} turns, round {index + 1}, {way}: {seconds[way][-1]:.2f} s")
    found: dict[str, Any] = {way: summary(values) for way, values in seconds.items()}
    return {**found, "ratio": found["again"]["median"] / found["kept"]["median"]}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each number of turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a model directory")
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--turns", type=int, nargs="+", default=[4, 10])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--smoke", action="store_true", help="a tiny model, two conversations of two turns, once")
    own = parser.parse_args(arguments)
    if not own.smoke and own.model is None:
        sys.exit("kept_turns: no --model; needs a model directory, or --smoke")
    with tempfile.TemporaryDirectory(prefix="kept-turns-") as scratch:
        path = own.model.resolve() if own.model else write_tiny_model(Path(scratch) / "tiny")
        model = load_model(ModelKind.CAUSAL_LM, ModelConfig(path=str(path)), dtype="float32", device="cpu")
    if not isinstance(model, PolicyModel):
        sys.exit(f"kept_turns: found another kind of model at '{path}'; needs a causal language model")
    number, rounds, sizes = (2, 1, [2]) if own.smoke else (own.conversations, own.rounds, own.turns)
    emit("kept_turns", {str(turns): measured(model, number, turns, rounds) for turns in sizes}, machine())


if __name__ == "__main__":
    main()
