"""A generative judge on vLLM: a thin shell, so that planning imports no vllm."""

import asyncio
import itertools
from collections.abc import Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from rlcore import Message, RawScore, RewardReplica, ScoreRequest, WorkerError
from rlcore.errors import boundary
from rlcore_reward_loop.settings import ModelSettings, RewardLoopSettings

KV_CACHE_GIB = 1.0
GPU_MEMORY_FRAC = 0.9
PLAIN_OPTIONS = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop")
GUIDES = ("json", "regex", "choice")
"""Options that bind the answer to a JSON schema, a regular expression, or one of several texts."""


def reserved_frac(settings: ModelSettings) -> float:
    """The share of a GPU's memory that a replica reserves while it is awake; 0.0 of another backend."""
    if settings.backend != "vllm":
        return 0.0
    return float(settings.options.get("gpu_memory_utilization", GPU_MEMORY_FRAC))


class VllmReplica(RewardReplica):
    """Answers conversations with text, from which the caller takes the score."""

    def setup(self) -> None:
        """Start the engine; WorkerError when vLLM is missing, too old, or cannot serve the model."""
        from transformers import AutoConfig, AutoTokenizer

        from rlcore.backends.vllm.engine import ending_with, memory_arguments, open_engine

        section, device = self.context.section, self.context.device
        if not isinstance(section, RewardLoopSettings) or self.context.role not in section.models:
            raise WorkerError(f"{self.context}: plugins.reward_loop.models has no '{self.context.role}'")
        self.settings: ModelSettings = section.models[self.context.role]
        path = self.settings.path
        with boundary(f"judge '{path}' cannot be loaded", WorkerError):
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                self.settings.tokenizer or path, trust_remote_code=False
            )
            config: Any = AutoConfig.from_pretrained(path, trust_remote_code=False).get_text_config()
        self.max_tokens = min(
            self.settings.max_tokens, getattr(config, "max_position_embeddings", self.settings.max_tokens)
        )
        arguments = {
            "model": path,
            "tokenizer": self.settings.tokenizer or path,
            "dtype": self.settings.dtype,
            "max_model_len": self.max_tokens,
            "generation_config": "vllm",
            "enable_prefix_caching": True,
            "enable_sleep_mode": device != "cpu",
        }
        arguments |= memory_arguments(device, KV_CACHE_GIB, GPU_MEMORY_FRAC) | self.settings.options
        self._engine = open_engine(arguments, str(self.context), self.context.threads)
        self._ending = partial(ending_with, self._engine, self.context)
        self._awake, self._idle = asyncio.Event(), asyncio.Event()
        self._awake.set()
        self._idle.set()
        self._num_under_way = 0
        self._numbers = itertools.count()

    async def score(self, requests: Sequence[ScoreRequest]) -> list[RawScore]:
        """The judge's answer to each conversation; one that is too long has an error instead."""
        await self._awake.wait()
        self._num_under_way += 1
        self._idle.clear()
        try:
            with self._ending(), boundary(f"{self.context}: its engine", WorkerError):
                return list(await asyncio.gather(*(self._answer(each) for each in requests)))
        finally:
            self._num_under_way -= 1
            if not self._num_under_way:
                self._idle.set()

    async def _answer(self, request: ScoreRequest) -> RawScore:
        from vllm import TokensPrompt  # type: ignore[import-not-found]

        options = dict(request.options)
        unknown = sorted(options.keys() - {*PLAIN_OPTIONS, *GUIDES})
        if unknown:
            known = ", ".join((*PLAIN_OPTIONS, *GUIDES))
            return RawScore(request.id, error=f"option '{unknown[0]}' is not known; choose from: {known}")
        ids = self._encode(request.messages)
        if not ids or len(ids) + int(options.get("max_tokens", 16)) > self.max_tokens:
            error = f"the conversation has {len(ids)} tokens; with the answer {self.max_tokens} are the most"
            return RawScore(request.id, error=error)
        final, number = None, f"{request.id}.{next(self._numbers)}"
        prompt = TokensPrompt(prompt_token_ids=ids)
        async with aclosing(self._engine.generate(prompt, _sampling(options), number)) as outputs:
            async for output in outputs:
                final = output.outputs[0]
        if final is None:
            return RawScore(request.id, error="the judge said nothing")
        if final.finish_reason == "length" and not options.keys() & set(GUIDES):
            return RawScore(request.id, error="the answer was cut off; raise judge.max_tokens")
        return RawScore(request.id, text=final.text)

    def _encode(self, messages: Sequence[Message]) -> list[int]:
        plain = [dict(each) for each in messages]
        if self._tokenizer.chat_template:
            ids = self._tokenizer.apply_chat_template(
                plain, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        else:
            text = "\n".join(f"{each.get('role')}: {each.get('content') or ''}" for each in plain)
            ids = self._tokenizer.encode(text + "\nassistant: ")
        return [int(each) for each in ids]

    async def health(self) -> str:
        with boundary(f"{self.context}: its engine", WorkerError):
            await self._engine.check_health()
        return f"{self.settings.path} on vLLM, {self.context.device}"

    async def sleep(self) -> None:
        """Drain, then hand the device's memory to others; on a CPU there is nothing to hand over."""
        self._awake.clear()
        await self._idle.wait()
        if self.context.device != "cpu":
            await self._engine.sleep(1)

    async def wake(self) -> None:
        if not self._awake.is_set() and await self._engine.is_sleeping():
            await self._engine.wake_up()
        self._awake.set()

    def close(self) -> None:
        if hasattr(self, "_engine"):
            self._engine.shutdown()


def _sampling(options: dict[str, Any]) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams  # type: ignore[import-not-found]

    plain = {name: options[name] for name in PLAIN_OPTIONS if name in options}
    guide = {name: options[name] for name in GUIDES if name in options}
    return SamplingParams(
        **plain,
        output_kind=RequestOutputKind.FINAL_ONLY,
        structured_outputs=StructuredOutputsParams(**guide) if guide else None,
    )
