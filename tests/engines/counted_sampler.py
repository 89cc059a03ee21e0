"""The embedded rollout with counts of what it computes and keeps, and conversations for it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rlcore.config import ModelConfig
from rlcore.data.tokenizer import ByteTokens
from rlcore.engines.hf.sample.kv_cache import PromptPass, RowPass
from rlcore.engines.hf.sample.sampler import EmbeddedSampler
from rlcore.engines.hf.train.model import ModelKind, PolicyModel, load_model
from rlcore.types import Completion, GenerateRequest, Sampling

ENOUGH = 10_000


def model_of(path: Path, dtype: str = "float64", attention: Any = "sdpa") -> PolicyModel:
    config = ModelConfig(path=str(path), attention=attention)
    model = load_model(ModelKind.CAUSAL_LM, config, dtype=dtype, device="cpu")
    assert isinstance(model, PolicyModel)
    return model


class Counted(EmbeddedSampler):
    """A sampler that counts the tokens of its passes over prompts and over further turns, and of what it keeps."""

    def __init__(self, model: PolicyModel, cached_tokens: int, max_rows: int = 8, **settings: Any) -> None:
        super().__init__(
            model,
            ByteTokens(),
            max_rows=max_rows,
            device=torch.device("cpu"),
            cached_tokens=cached_tokens,
            **settings,
        )
        self.prompts, self.turns, self.row_passes = list[int](), list[int](), list[RowPass]()
        compute = self._decoder._pass
        self.most = self.most_slots = 0
        """Tokens of kept turns and of the slots of live rows together, where there were kept turns, and of slots."""

        def counted(now: PromptPass | RowPass, token_ids_NT: Any) -> Any:
            if isinstance(now, PromptPass):
                self.prompts += [token_ids_NT.shape[1]] * len(token_ids_NT)
            elif now.tokens > 1:
                self.turns += [now.tokens] * len(token_ids_NT)
            if isinstance(now, RowPass):
                self.row_passes.append(now)
            return compute(now, token_ids_NT)

        self._decoder._pass = counted  # type: ignore[method-assign]

    def _step(self) -> None:
        super()._step()
        slots = self._decoder._cache.capacity
        self.most_slots = max(self.most_slots, slots)
        if self.kept:
            self.most = max(self.most, self._decoder.kept.num_tokens + slots)

    @property
    def kept(self) -> list[int]:
        """Tokens of each kept turn after its prompt."""
        return [turn.num_own for turn in self._decoder.kept._turns]


def requests_of(texts: Sequence[Sequence[int]], turn: int, n: int = 1, max_tokens: int = 9) -> list[GenerateRequest]:
    sampling = Sampling(max_tokens=max_tokens)
    return [
        GenerateRequest(f"g{index}/{turn}", tuple(ids), sampling, n, seed=17 * index + turn, conversation=f"g{index}")
        for index, ids in enumerate(texts)
    ]


async def sampled(sampler: EmbeddedSampler, requests: Sequence[GenerateRequest]) -> list[Completion]:
    found = [completion async for completion in sampler.generate(requests)]
    return sorted(found, key=lambda completion: (completion.request_id, completion.sample))


async def conversations(sampler: EmbeddedSampler, num_turns: int = 4) -> list[Completion]:
    """Two groups of two conversations, whose first turns share a prompt, with tools' answers of different lengths."""
    every = await sampled(sampler, requests_of([range(40, 52), range(60, 65)], 0, n=2))
    texts = [[*range(40, 52), *every[index].token_ids] for index in (0, 1)]
    texts += [[*range(60, 65), *every[index].token_ids] for index in (2, 3)]
    for turn in range(1, num_turns):
        for index, ids in enumerate(texts):
            ids += range(70, 71 + index * turn)
        found = await sampled(sampler, requests_of(texts, turn))
        for ids, completion in zip(texts, found, strict=True):
            ids += completion.token_ids.tolist()
        every += found
    return every
