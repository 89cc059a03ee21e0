"""Reward models, the same on every backend: the tokens of a conversation, and the output that is its score.

`RewardModel` describes the model that a `RewardReplica` serves. Importing this module imports no heavy library.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlcore.contracts.foreign_text import ForeignText
from rlcore.contracts.model_files import check_model_files
from rlcore.contracts.templates import render
from rlcore.contracts.workers import WorkerContext
from rlcore.errors import ConfigError, RlcoreError, WorkerError, boundary, shown
from rlcore.errors.checks.data import check_is, check_text_choice, check_texts, check_whole
from rlcore.types import Message

BYTES = "bytes"
ARCHITECTURE = "ForSequenceClassification"
"""Suffix of the names of transformers' classes with a head for scores."""
HEADS = ("score.", "classifier.")
"""Prefixes of the names of those heads' weights."""
GUIDES = ("json", "json_object", "regex", "choice")
"""`ScoreRequest.options` that constrain a judge's answer to a JSON schema, any JSON object, a regular expression, or
one of several texts."""


@dataclass(frozen=True)
class RewardModel:
    """A reward model that a `RewardReplica` serves: `WorkerContext.spec` of its workers."""

    path: str
    """A local model directory or a hub name."""
    tokenizer: str = ""
    """Directory or hub name; `bytes` for none; empty: that of `path`."""
    dtype: str = "float32"
    """Number format of the weights."""
    label: int = 0
    """Index of the output that is the score."""
    activation: Literal["none", "sigmoid", "softmax"] = "none"
    """Activation function of the outputs."""
    max_tokens: int = 4096
    """The most tokens of a conversation, including a judge's answer; a longer one is an error of its request."""
    kinds: frozenset[str] = frozenset()
    """Kinds of rewards that use it: `model` reads scores, `judge` reads text."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Extra arguments of the backend's engine."""

    def __post_init__(self) -> None:
        check_texts(self, "path", "dtype")
        check_is(self, "tokenizer", str)
        check_whole(self, 0, "label")
        check_whole(self, 1, "max_tokens")
        check_text_choice(self, "activation", ["none", "sigmoid", "softmax"])
        check_is(self, "kinds", frozenset)
        check_is(self, "options", Mapping)


def model_of(context: WorkerContext) -> RewardModel:
    """The model that a worker serves; WorkerError when its request states none."""
    if not isinstance(context.spec, RewardModel):
        raise WorkerError(
            f"{context}: found {shown(context.spec)} to serve; needs WorkerRequest(spec=RewardModel(...))"
        )
    return context.spec


class Unreadable(RlcoreError):
    """A single request cannot be answered; the message gives the reason."""


class Conversations:
    """The configuration and tokenizer of a reward model."""

    def __init__(self, model: RewardModel) -> None:
        """WorkerError when they cannot be read, ConfigError when the model lacks the requested output or has files that
        must not be read."""
        from transformers import AutoConfig, AutoTokenizer

        self._model = model
        self._tokenizer: Any = None
        whose = f"reward model '{model.path}' cannot be loaded"
        with boundary(whose, WorkerError):
            check_model_files(whose, Path(model.path))
            self.config: Any = AutoConfig.from_pretrained(model.path, trust_remote_code=False)
            if model.tokenizer != BYTES:
                where = model.tokenizer or model.path
                check_model_files(whose, Path(where))
                self._tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=False)
        self._foreign = None if self._tokenizer is None else ForeignText(self._tokenizer)
        check_outputs(model, self.config.num_labels)
        text = self.config.get_text_config()
        self.max_tokens = min(model.max_tokens, getattr(text, "max_position_embeddings", model.max_tokens))
        self._num_ids = getattr(text, "vocab_size", 1 << 62)
        self.pad_id = self._padding(text)
        """The padding id; a conversation is scored at its last other token. None: unknown."""

    def _padding(self, text_config: Any) -> int | None:
        found = text_config.pad_token_id
        if found is None and self._tokenizer is not None:
            found = self._tokenizer.pad_token_id
            found = self._tokenizer.eos_token_id if found is None else found
        return None if found is None else int(found)

    def read(self, messages: Sequence[Message]) -> list[int]:
        """The token ids of a conversation; Unreadable when it cannot be scored."""
        with boundary("the conversation cannot be read", Unreadable):
            ids = self.encode(messages)
        if not 0 < len(ids) <= self.max_tokens:
            raise Unreadable(f"the conversation has {len(ids)} tokens; needs 1 to {self.max_tokens}")
        if max(ids) >= self._num_ids:
            raise Unreadable(f"the conversation holds token {max(ids)}; the model knows those below {self._num_ids}")
        return ids

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """The token ids of a conversation: by the chat template if there is one, else 'role: content' lines."""
        if self._foreign is None:
            return list("".join(f"{text.get('role')}: {text.get('content') or ''}\n" for text in messages).encode())
        return conversation_ids(self._foreign, messages)

    def score(self, logits: Sequence[float]) -> float:
        """The output that is the score, after the activation."""
        return activated(logits, self._model)


def conversation_ids(foreign: ForeignText, messages: Sequence[Message], *, opening: bool = False) -> list[int]:
    """The token ids of a conversation, with `opening` also those of the beginning of an answer.

    The text comes from the chat template if there is one, else it is 'role: content' lines. Special tokens spelled in a
    message stay text. Unreadable when the template raises or exceeds its limits.
    """
    plain = foreign.guarded([dict(message) for message in messages])
    tokenizer = foreign.tokenizer
    if not tokenizer.chat_template:
        lines = [f"{text.get('role')}: {text.get('content') or ''}" for text in plain]
        return foreign.encode("\n".join([*lines, "assistant: "] if opening else lines), add_special_tokens=True)
    try:
        text = render(tokenizer, plain, foreign.whose, add_generation_prompt=opening)
    except ConfigError as cause:
        raise Unreadable(f"the conversation cannot be read: {cause}") from cause
    return foreign.encode(text)


def activated(logits: Sequence[float], model: RewardModel) -> float:
    """Output `model.label`, after `model.activation`."""
    chosen = logits[model.label]
    if model.activation == "sigmoid":
        return 1.0 / (1.0 + math.exp(-chosen)) if chosen >= 0 else math.exp(chosen) / (1.0 + math.exp(chosen))
    if model.activation == "softmax":
        most = max(logits)
        return math.exp(chosen - most) / math.fsum(math.exp(logit - most) for logit in logits)
    return chosen


def until_padding(ids: Sequence[int], pad_id: int | None) -> list[int]:
    """The ids up to the last one that is not padding, at least one: transformers' classifiers read the score there."""
    end = len(ids)
    while end > 1 and ids[end - 1] == pad_id:
        end -= 1
    return list(ids[:end])


def check_outputs(model: RewardModel, num_outputs: int) -> None:
    """ConfigError when output `model.label` does not exist, or when a softmax has one output only."""
    if model.label >= num_outputs:
        raise ConfigError(f"reward model '{model.path}': label={model.label}, but it has {num_outputs} outputs")
    if model.activation == "softmax" and num_outputs < 2:
        raise ConfigError(f"reward model '{model.path}': softmax of its one output is always 1; needs sigmoid")


def serves_scores(path: str, architectures: Sequence[str], kinds: Iterable[str]) -> bool:
    """True if a model of these architectures has a head for scores; otherwise it writes text.

    ConfigError when rewards of one of these kinds need the other sort of model.
    """
    scores = any(architecture.endswith(ARCHITECTURE) for architecture in architectures)
    found = ", ".join(architectures) or "of no known architecture"
    if scores and "judge" in kinds:
        raise ConfigError(
            f"reward model '{path}': it is {found}, which gives numbers, and a reward of kind=judge reads text; "
            "choose kind=model, or a generative model"
        )
    if not scores and "model" in kinds:
        raise ConfigError(
            f"reward model '{path}': it is {found}, which has no score head; kind=model needs a model whose "
            f"architecture ends in {ARCHITECTURE}; choose another, or kind=judge"
        )
    return scores


def check_head(path: str) -> None:
    """ConfigError when the weights in a local directory are known and none of them is a score head's."""
    directory = Path(path)
    index = directory / "model.safetensors.index.json"
    names: set[str] = set()
    if index.is_file():
        with boundary(f"reward model '{path}' cannot be loaded", WorkerError):
            names.update(json.loads(index.read_text("utf-8"))["weight_map"])
    else:
        from safetensors import safe_open

        for file in sorted(directory.glob("*.safetensors")):
            with boundary(f"reward model '{path}' cannot be loaded", WorkerError), safe_open(file, "numpy") as weights:
                names.update(weights.keys())
    if names and not any(name.startswith(HEADS) for name in names):
        raise headless(path, f"{HEADS[0]}weight")


def headless(path: str, missing: str) -> ConfigError:
    """The error for a model whose files lack weights of its head: those would be random."""
    return ConfigError(
        f"reward model '{path}': its files have no weight '{missing}', so its scores would be random; needs a model "
        "that was saved with its score head"
    )
