"""A generative judge in a vLLM engine: it answers conversations with text, from which the caller takes the score."""

from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from rlcore import Message, RawScore, ScoreRequest, WorkerError
from rlcore.errors import boundary
from rlcore_reward_loop.settings import ModelSettings

PLAIN_OPTIONS = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop")
GUIDES = ("json", "regex", "choice")
"""Options that bind the answer to a JSON schema, a regular expression, or one of several texts."""


class VllmJudge:
    """Knows the tokenizer; the engine is given with each request."""

    def __init__(self, settings: ModelSettings, config: Any) -> None:
        """`config` is the model's configuration; WorkerError when the tokenizer cannot be loaded."""
        from transformers import AutoTokenizer

        self._where = settings.tokenizer or settings.path
        with boundary(f"judge '{settings.path}' cannot be loaded", WorkerError):
            self._tokenizer: Any = AutoTokenizer.from_pretrained(self._where, trust_remote_code=False)
        text = config.get_text_config()
        self.max_tokens = min(settings.max_tokens, getattr(text, "max_position_embeddings", settings.max_tokens))

    def arguments(self) -> dict[str, Any]:
        """Arguments of vLLM's AsyncEngineArgs that a judge needs."""
        return {"tokenizer": self._where, "generation_config": "vllm", "enable_prefix_caching": True}

    async def answer(self, engine: Any, request: ScoreRequest, number: str) -> RawScore:
        """The judge's answer to a conversation; one that is too long has an error instead."""
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
        final, prompt = None, TokensPrompt(prompt_token_ids=ids)
        async with aclosing(engine.generate(prompt, _sampling(options), number)) as outputs:
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
