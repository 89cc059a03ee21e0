"""Compares the embedded rollout with transformers' `generate`, and with vLLM if it can be imported.

    OMP_NUM_THREADS=2 .venv/bin/python benchmarks/generation.py [--dtype bfloat16] [--smoke]

First a gate: greedy tokens must be equal. Then prints one JSON line: tokens per second of each, in turns A B A B. All
have the same model, prompts, number of rows, length of every response (nothing ends a row early), dtype and threads.
"""

import argparse
import asyncio
import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from measure import MODEL, emit, gemm_peak_gflops, machine, peak_rss_bytes, say, summary, timed
from rlcore_vllm.engine import ENVIRONMENT, GIB

from rlcore.config import ModelConfig
from rlcore.contracts.tokens import Tokens
from rlcore.data.tokenizer import load_tokens
from rlcore.engines.freed_memory import keep_freed_memory
from rlcore.engines.hf.sample.sampler import EmbeddedSampler
from rlcore.engines.hf.train.model import ModelKind, PolicyModel, load_model
from rlcore.engines.huge_pages import use_huge_pages
from rlcore.types import Completion, GenerateRequest, Sampling

GATE_TOKENS = 8
KV_CACHE_GIB = 2.0
"""Size of vLLM's KV cache."""


@dataclass(frozen=True)
class Work:
    """The work of each side."""

    prompts: tuple[tuple[int, ...], ...]
    samples: int
    new_tokens: int

    @property
    def num_tokens(self) -> int:
        """Total number of sampled tokens."""
        return len(self.prompts) * self.samples * self.new_tokens

    def shortened(self) -> "Work":
        """The same rows with few tokens each, for warming up."""
        return Work(self.prompts, self.samples, min(4, self.new_tokens))


class Embedded:
    """The embedded rollout."""

    def __init__(self, model: PolicyModel, tokens: Tokens) -> None:
        tokens.eos_ids = frozenset()
        self._sampler = EmbeddedSampler(model, tokens, max_rows=64, device=torch.device("cpu"))

    def run(self, work: Work, temperature: float = 1.0) -> list[list[int]]:
        """The first sample of each prompt."""
        sampling = Sampling(temperature=temperature, max_tokens=work.new_tokens)
        requests = [
            GenerateRequest(f"{index:03}", ids, sampling, work.samples, index) for index, ids in enumerate(work.prompts)
        ]

        async def everything() -> list[Completion]:
            return [completion async for completion in self._sampler.generate(requests)]

        done = asyncio.run(everything())
        assert_lengths([len(result.token_ids) for result in done], work)
        firsts = sorted((result for result in done if result.sample == 0), key=lambda completion: completion.request_id)
        return [first.token_ids.tolist() for first in firsts]


class Transformers:
    """`generate` with the same weights, prompts padded on the left, and every prompt once per sample."""

    def __init__(self, model: PolicyModel) -> None:
        self._model = model.transformer
        self._model.generation_config.eos_token_id = None  # nothing ends a row early

    def run(self, work: Work, temperature: float = 1.0) -> list[list[int]]:
        """The first sample of each prompt."""
        longest = max(map(len, work.prompts))
        token_ids_BT = torch.tensor([[0] * (longest - len(ids)) + list(ids) for ids in work.prompts])
        valid_BT = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in work.prompts])
        draws = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        samples = work.samples if temperature else 1
        found_BT = self._model.generate(
            token_ids_BT,
            attention_mask=valid_BT,
            max_new_tokens=work.new_tokens,
            num_return_sequences=samples,
            pad_token_id=0,
            **draws,
        )[:, longest:]
        assert_lengths([found_BT.shape[1]] * len(found_BT), work, samples)
        return [row.tolist() for row in found_BT[::samples]]


class Vllm:
    """vLLM without compilation."""

    def __init__(self, model: Path, dtype: str) -> None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        import vllm  # type: ignore[import-not-found]

        self._vllm = vllm
        memory = int(KV_CACHE_GIB * GIB)
        self._engine = vllm.LLM(
            model=str(model), dtype=dtype, enforce_eager=True, max_model_len=1024, kv_cache_memory_bytes=memory
        )

    def run(self, work: Work, temperature: float = 1.0) -> list[list[int]]:
        """The first sample of each prompt."""
        settings = self._vllm.SamplingParams(
            n=work.samples, temperature=temperature, max_tokens=work.new_tokens, ignore_eos=True
        )
        prompts = [{"prompt_token_ids": list(ids)} for ids in work.prompts]
        outputs = self._engine.generate(prompts, settings, use_tqdm=False)
        assert_lengths([len(completion.token_ids) for output in outputs for completion in output.outputs], work)
        return [list(output.outputs[0].token_ids) for output in outputs]


def assert_lengths(lengths: Sequence[int], work: Work, samples: int | None = None) -> None:
    """SystemExit unless every row has been sampled to its full length."""
    expected = [work.new_tokens] * (len(work.prompts) * (samples or work.samples))
    if sorted(lengths) != expected:
        raise SystemExit(f"generation: {len(lengths)} rows of lengths {sorted(set(lengths))}, expected {work}")


def prompts_of(vocabulary: int, num: int, length: int) -> tuple[tuple[int, ...], ...]:
    """Random prompts of `length` tokens or up to a tenth fewer."""
    generator = torch.Generator().manual_seed(0)
    shorter = torch.randint(0, length // 10 + 1, (num,), generator=generator).tolist()
    return tuple(tuple(torch.randint(0, vocabulary, (length - s,), generator=generator).tolist()) for s in shorter)


def rates(sides: dict[str, Callable[[Work], Any]], work: Work, repeats: int) -> dict[str, dict[str, float]]:
    """Tokens per second of each side; the sides take turns."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for run in sides.values():
        run(work.shortened())
    for _ in range(repeats):
        for name, run in sides.items():
            found[name].append(work.num_tokens / timed(lambda run=run: run(work)))  # type: ignore[misc]
            say(f"{name}: {found[name][-1]:.1f} tokens/s")
    return {name: summary(values) for name, values in found.items()}


def gate(embedded: Embedded, other: Transformers, work: Work, num_tokens: int) -> None:
    """SystemExit unless both sides give the same greedy tokens."""
    greedy = Work(work.prompts, 1, num_tokens)
    ours, theirs = embedded.run(greedy, 0.0), other.run(greedy, 0.0)
    if ours != theirs:
        raise SystemExit(f"generation: greedy tokens differ: {ours} and {theirs}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=45)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", type=int, default=int(os.environ.get("OMP_NUM_THREADS", "2")))
    parser.add_argument("--smoke", action="store_true", help="few short rows, once: does it still run?")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    keep_freed_memory()  # as in every run, like huge pages; both affect every side in this process
    use_huge_pages()
    settings = ModelConfig(path=str(chosen.model), tokenizer="bytes" if chosen.smoke else "")
    model = load_model(ModelKind.CAUSAL_LM, settings, dtype=chosen.dtype, device="cpu")
    if not isinstance(model, PolicyModel):
        raise SystemExit(f"generation: {chosen.model} is not a causal language model")
    prompts = prompts_of(len(model.head.linear.weight) - 64, chosen.prompts, chosen.prompt_tokens)
    work = Work(prompts[:2], 2, 4) if chosen.smoke else Work(prompts, chosen.samples, chosen.new_tokens)
    embedded, other = Embedded(model, load_tokens(settings, "")), Transformers(model)
    # In half precision the roundings of an earlier token decide between later ones that are nearly as likely.
    gate(embedded, other, work, GATE_TOKENS if chosen.dtype == "float32" else 1)
    sides: dict[str, Callable[[Work], Any]] = {"embedded": embedded.run, "generate": other.run}
    if importlib.util.find_spec("vllm") is not None and not chosen.smoke:
        sides["vllm"] = Vllm(chosen.model, chosen.dtype).run
    peak_before = gemm_peak_gflops(chosen.threads, seconds=0.1 if chosen.smoke else 2.0)
    found = rates(sides, work, 1 if chosen.smoke else chosen.repeats)
    emit(
        "generation",
        {
            "model": chosen.model.name,
            "rows": len(work.prompts) * work.samples,
            "prompts": len(work.prompts),
            "prompt_tokens": chosen.prompt_tokens,
            "new_tokens": work.new_tokens,
            "dtype": chosen.dtype,
            "tokens_per_s": found,
            "embedded_over_generate": found["embedded"]["median"] / found["generate"]["median"],
            "gemm_peak_gflops": [peak_before, gemm_peak_gflops(chosen.threads, 0.1 if chosen.smoke else 2.0)],
            "peak_rss_bytes": peak_rss_bytes(),
        },
        machine(chosen.threads),
    )


if __name__ == "__main__":
    main()
