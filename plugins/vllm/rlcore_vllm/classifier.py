"""A sequence classifier or scalar head in a vLLM engine, which forms the batches. Its scores equal those of `hf`."""

from contextlib import aclosing
from typing import Any

from rlcore import RawScore, ScoreRequest
from rlcore.contracts.reward_models import Conversations, RewardModel, check_head, until_padding


class VllmClassifier:
    """Reads conversations and outputs. Each request passes the engine."""

    def __init__(self, model: RewardModel) -> None:
        """WorkerError when its tokenizer cannot be loaded, ConfigError when it lacks the head or output."""
        self._conversations = Conversations(model)
        check_head(model.path)
        self.max_tokens = self._conversations.max_tokens

    def arguments(self) -> dict[str, Any]:
        """The AsyncEngineArgs of vLLM that a classifier needs. Inputs are ids, so vLLM needs no tokenizer."""
        return {"runner": "pooling", "skip_tokenizer_init": True}

    async def answer(self, engine: Any, request: ScoreRequest, number: str) -> RawScore:
        """The score of a conversation; Unreadable when it has none."""
        from vllm import PoolingParams, TokensPrompt  # type: ignore[import-not-found]

        ids = self._conversations.read(request.messages)
        # vLLM scores the last token, whatever it is.
        prompt = TokensPrompt(prompt_token_ids=until_padding(ids, self._conversations.pad_id))
        logits: list[float] = []
        # Without vLLM's activation, which depends on the model's configuration.
        async with aclosing(
            engine.encode(prompt, PoolingParams(task="classify", use_activation=False), number)
        ) as outputs:
            async for output in outputs:
                logits = [float(number) for number in output.outputs.data.flatten()]
        return RawScore(request.id, self._conversations.score(logits))
