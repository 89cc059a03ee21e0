"""Tokens that the embedded rollout does not compute again: earlier turns of conversations, and common beginnings.

    .venv/bin/python benchmarks/cached_prefixes.py --model DIRECTORY [--turns 4 10] [--beginnings 100 800] [--rounds 3]

Turns: conversations with the keys and values of finished turns, and without, in turn. Beginnings: prompts that begin
alike, and prompts of that length that do not. Prints one JSON line on stdout: seconds of a round, per number of turns
and per tokens of the beginning, and the ratio of the medians.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
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
"""Tokens of a conversation's prompt, the most of a turn, and those of a tool's answer."""
SAMPLES = 4
"""Conversations of a prompt."""
FURTHER, RESPONSE = 40, 32
"""Tokens of a prompt after its beginning, and the most of its response."""
Work = Callable[[PolicyModel, bool], float]
"""Seconds of the work, with tokens that are computed once, or again and again."""


async def conversations(sampler: EmbeddedSampler, number: int, turns: int) -> None:
    """Conversations of that many prompts, whose turns begin together."""
    texts: dict[tuple[int, int], list[int]] = {}
    for turn in range(turns):
        if turn:
            wanted = [(f"{prompt}/{sample}", ids, 1) for (prompt, sample), ids in texts.items()]
        else:
            wanted = [
                (f"{prompt}", list(range(100 + prompt, 100 + prompt + PROMPT)), SAMPLES) for prompt in range(number)
            ]
        requests = [
            GenerateRequest(name, tuple(ids), Sampling(max_tokens=SAMPLED), n, turn, conversation=name.split("/")[0])
            for name, ids, n in wanted
        ]
        before = {request.id: request.token_ids for request in requests}
        async for found in sampler.generate(requests):
            prompt, *sample = (int(number) for number in found.request_id.split("/"))
            ids = [*before[found.request_id], *found.token_ids.tolist(), *range(50, 50 + ANSWER)]
            texts[prompt, (sample or [found.sample])[0]] = ids


async def prompts(sampler: EmbeddedSampler, number: int, beginning: int, alike: bool) -> None:
    """A sample of each prompt."""
    common = tuple(100 + index % 150 for index in range(beginning - 1))
    requests = [
        GenerateRequest(
            f"{index}",
            (7 if alike else 7 + index, *common, *range(index, index + FURTHER)),
            Sampling(max_tokens=RESPONSE),
            1,
            index,
        )
        for index in range(number)
    ]
    async for _ in sampler.generate(requests):
        pass


def turns_of(number: int, turns: int) -> Work:
    """The work of conversations of that many prompts."""

    def seconds(model: PolicyModel, once: bool) -> float:
        sampler = sampler_of(model, number * SAMPLES, cached_tokens=2**30 if once else 0)
        began = time.perf_counter()
        asyncio.run(conversations(sampler, number, turns))
        return time.perf_counter() - began

    return seconds


def beginnings_of(number: int, beginning: int) -> Work:
    """The work of prompts."""

    def seconds(model: PolicyModel, once: bool) -> float:
        sampler = sampler_of(model, number)
        began = time.perf_counter()
        asyncio.run(prompts(sampler, number, beginning, once))
        return time.perf_counter() - began

    return seconds


def sampler_of(model: PolicyModel, rows: int, cached_tokens: int = 0) -> EmbeddedSampler:
    """A sampler that admits all rows at once."""
    return EmbeddedSampler(model, ByteTokens(), max_rows=rows, device=torch.device("cpu"), cached_tokens=cached_tokens)


def measured(name: str, model: PolicyModel, work: Work, rounds: int) -> dict[str, Any]:
    """The seconds of each way, and their ratio."""
    seconds: dict[str, list[float]] = {"once": [], "again": []}
    for index in range(rounds):
        for way, values in seconds.items():
            values.append(work(model, way == "once"))
            say(f"cached_prefixes: {name}, round {index + 1}, {way}: {values[-1]:.2f} s")
    found: dict[str, Any] = {way: summary(values) for way, values in seconds.items()}
    return {**found, "ratio": found["again"]["median"] / found["once"]["median"]}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each number of turns, and each length of the beginning."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a model directory")
    parser.add_argument("--turns", type=int, nargs="*", default=[4, 10])
    parser.add_argument("--beginnings", type=int, nargs="*", default=[100, 800])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--smoke", action="store_true", help="a tiny model and few tokens, once")
    own = parser.parse_args(arguments)
    if not own.smoke and own.model is None:
        sys.exit("cached_prefixes: no --model; needs a model directory, or --smoke")
    with tempfile.TemporaryDirectory(prefix="cached-prefixes-") as scratch:
        path = own.model.resolve() if own.model else write_tiny_model(Path(scratch) / "tiny")
        model = load_model(ModelKind.CAUSAL_LM, ModelConfig(path=str(path)), dtype="float32", device="cpu")
    if not isinstance(model, PolicyModel):
        sys.exit(f"cached_prefixes: found another kind of model at '{path}'; needs a causal language model")
    if own.smoke:
        works = {"2 turns": turns_of(1, 2), "80 tokens": beginnings_of(2, 80)}
    else:
        works = {f"{turns} turns": turns_of(2, turns) for turns in own.turns}
        works |= {f"{size} tokens": beginnings_of(32, size) for size in own.beginnings}
    rounds = 1 if own.smoke else own.rounds
    emit("cached_prefixes", {name: measured(name, model, work, rounds) for name, work in works.items()}, machine())


if __name__ == "__main__":
    main()
