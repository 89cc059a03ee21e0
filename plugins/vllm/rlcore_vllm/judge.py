"""A generative judge in a vLLM engine. It answers conversations with text; the caller reads the score."""

import json
from collections.abc import Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

from rlcore import RawScore, ScoreRequest, WorkerError
from rlcore.contracts.foreign_text import ForeignText
from rlcore.contracts.model_files import check_model_files
from rlcore.contracts.reward_models import GUIDES, RewardModel, Unreadable, conversation_ids
from rlcore.errors import boundary

PLAIN_OPTIONS = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop")


class VllmJudge:
    """Has the tokenizer. Each request passes the engine."""

    def __init__(self, model: RewardModel, config: Any) -> None:
        """`config` is the model's configuration; WorkerError when the tokenizer cannot be loaded."""
        from transformers import AutoTokenizer

        self._where = model.tokenizer or model.path
        whose = f"judge '{model.path}' cannot be loaded"
        with boundary(whose, WorkerError):
            check_model_files(whose, Path(self._where))
            tokenizer: Any = AutoTokenizer.from_pretrained(self._where, trust_remote_code=False)
        self._foreign = ForeignText(tokenizer)
        text = config.get_text_config()
        self.max_tokens = min(model.max_tokens, getattr(text, "max_position_embeddings", model.max_tokens))

    def arguments(self) -> dict[str, Any]:
        """The AsyncEngineArgs of vLLM that a judge needs."""
        return {"tokenizer": self._where, "generation_config": "vllm", "enable_prefix_caching": True}

    async def answer(self, engine: Any, request: ScoreRequest, number: str) -> RawScore:
        """The judge's answer to a conversation; Unreadable if there is none."""
        from vllm import TokensPrompt  # type: ignore[import-not-found]

        options = {key: value for key, value in request.options.items() if value is not None}
        check_options(options)
        with boundary("the conversation cannot be read", Unreadable):
            ids = conversation_ids(self._foreign, request.messages, opening=True)
        room = self.max_tokens - len(ids)
        wanted = options.setdefault("max_tokens", room)
        if not ids or not isinstance(wanted, int) or not 0 < wanted <= room:
            error = f"the conversation has {len(ids)} tokens; with the answer {self.max_tokens} are the most"
            raise Unreadable(f"{error}, and max_tokens={wanted}")
        with boundary("an option cannot be used", Unreadable):
            sampling = _sampling(options)
        final, prompt = None, TokensPrompt(prompt_token_ids=ids)
        async with aclosing(engine.generate(prompt, sampling, number)) as outputs:
            async for output in outputs:
                final = output.outputs[0]
        if final is None:
            raise Unreadable("the judge said nothing")
        if final.finish_reason == "length" and not is_whole(final.text, options):
            raise Unreadable("the answer was cut off; raise judge.max_tokens")
        return RawScore(request.id, text=final.text)


def check_options(options: Mapping[str, Any]) -> None:
    """Unreadable for an unknown option."""
    known = (*PLAIN_OPTIONS, *GUIDES)
    for name in sorted(options.keys() - set(known)):
        raise Unreadable(f"option '{name}' is not known; choose from: {', '.join(known)}")


def is_whole(text: str, options: Mapping[str, Any]) -> bool:
    """True if an answer that used all its tokens is complete: a guided answer may end exactly there."""
    if "regex" in options or "choice" in options:
        return True
    if "json" not in options and "json_object" not in options:
        return False
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


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
