"""The only owner of tokenizer and chat template: text becomes token ids here, once, and never again.

`load_tokens` reads what `model` and `data.system_prompt` say. Everybody else gets a `Tokens` from the build context.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcore.config import ModelConfig
from rlcore.errors import ConfigError, boundary
from rlcore.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BYTES = "bytes"
"""The value of `model.tokenizer` that picks `ByteTokens`."""
_END_PROBE = "rlcore0end0probe"
"""A text that no chat template contains, put where a response stands to see what follows it."""
_ASKED = {"role": "user", "content": "x"}
_THOUGHT = f"<think>\nx\n</think>\n\n{_END_PROBE}"
"""A response of the kind that some templates shorten once others follow it."""


class Tokens(ABC):
    """Prompts to token ids, token ids to text."""

    eos_ids: frozenset[int]
    """Tokens that end a response."""
    pad_id: int
    """What fills a row up; no mask selects it."""
    context_length: int | None
    """Tokens that the model's window holds; None is unknown."""

    def __init__(self, system_prompt: str = "") -> None:
        self._system_prompt = system_prompt
        self._num_end: int | None = None

    def encode_prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> tuple[int, ...]:
        """The ids of the conversation and the opening of the next assistant turn.

        The system prompt is put first when the conversation has no system message. `tools` are schemas in the form of
        OpenAI, for templates that tell the model about them.
        """
        plain = [_plain(message) for message in messages]
        if self._system_prompt and not any(message.get("role") == "system" for message in plain):
            plain.insert(0, {"role": "system", "content": self._system_prompt})
        return self._encode_text(self._render(plain, [_plain(tool) for tool in tools], opening=True))

    def continuation(self, messages: Sequence[Message], last_id: int) -> tuple[int, ...]:
        """The ids to put behind an assistant turn whose last sampled id is `last_id`.

        They are the end of that turn, unless `last_id` ended it, then `messages`, and the opening of the next assistant
        turn, with the separators of the chat template. Nothing that was there before is tokenised: the template is
        asked for a short conversation with the same messages, and what follows the response in it is what follows here.
        ConfigError when the template leaves responses out; `check_continuation` finds the other ways to be wrong.
        """
        said = {"role": "assistant", "content": _END_PROBE}
        text = self._render([_ASKED, said, *(_plain(message) for message in messages)], (), opening=True)
        ids = self._encode_text(_after_probe(text))
        return ids[self._end_of_turn_length() :] if last_id in self.eos_ids else ids

    def _end_of_turn_length(self) -> int:
        """How many ids the template puts behind a response up to the token that ends it; 0 if it has no such token."""
        if self._num_end is None:
            said = {"role": "assistant", "content": _END_PROBE}
            ids = self._encode_text(_after_probe(self._render([_ASKED, said], (), opening=False)))
            ends = [place for place, each in enumerate(ids) if each in self.eos_ids]
            self._num_end = ends[0] + 1 if ends else 0
        return self._num_end

    def check_continuation(self, roles: Sequence[str], tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """ConfigError naming the first role of `roles`, or `assistant`, that makes the template rewrite what was there.

        A template is prefix-stable if a conversation with one more message begins with the conversation without it, and
        an assistant's message with the opening of its turn. With any other, what the policy sees in training is not
        what the template would show it elsewhere. With `tools`, schemas in the form of OpenAI, that must hold where the
        template tells about them, and they must not change how a message is written: some templates put them before the
        last message of a user.
        """
        schemas = [_plain(tool) for tool in tools]
        way_out = "needs a chat template that only appends (model.chat_template names a file with one)"
        opened = self._render([_ASKED], schemas, opening=True)
        for said in (_END_PROBE, _THOUGHT):
            answered = [_ASKED, {"role": "assistant", "content": said}]
            before = self._render(answered, schemas, opening=False)
            if said == _END_PROBE and not (before.startswith(opened) and said in before):
                raise ConfigError(
                    "chat template: the role 'assistant' breaks it: a response does not stand behind the opening of "
                    f"its turn as it was sampled; {way_out}"
                )
            for role in roles:
                more = [*answered, {"role": role, "name": "x", "content": "y"}]
                try:
                    after = self._render(more, schemas, opening=True)
                except ConfigError as error:
                    raise ConfigError(
                        f"chat template: the role '{role}' breaks it: the template refuses it: {error}; {way_out}"
                    ) from error
                if not after.startswith(before.rstrip()):
                    raise ConfigError(
                        f"chat template: the role '{role}' breaks it: a message of this role changes how the turns "
                        f"before it are written; {way_out}"
                    )
                if (
                    schemas
                    and said == _END_PROBE
                    and _after_probe(after) != _after_probe(self._render(more, (), opening=True))
                ):
                    raise ConfigError(
                        f"chat template: the role '{role}' breaks it: a message of this role is written otherwise when "
                        f"there are tools; {way_out}"
                    )

    def tells_tools(self) -> bool:
        """Whether the chat template tells the model about tools."""
        tool = {"type": "function", "function": {"name": _END_PROBE, "description": "", "parameters": {}}}
        return _END_PROBE in self._render([_ASKED], [tool], opening=True)

    def check_stop(self, stop: Sequence[str], who: str = "rollout.stop") -> None:
        """ConfigError naming the first stop string that no response could be seen to hold: `decode` leaves out special
        tokens, and what one of them spells is sampled as that token."""
        for text in stop:
            hidden = next((special for special in self._special_texts() if special in text), None)
            if hidden is None:
                continue
            way_out = (
                f"leave it out: '{hidden}' ends a response anyway"
                if self._special_texts()[hidden] in self.eos_ids
                else f"name plain text, or make '{hidden}' an eos_token_id in the model's generation_config.json"
            )
            raise ConfigError(
                f"{who}: the string {text!r} holds '{hidden}', a special token; those are no part of a "
                f"response's text, so it would never be found; {way_out}"
            )

    def _special_texts(self) -> Mapping[str, int]:
        """The text of each token that `decode` leaves out, with its id."""
        return {}

    @abstractmethod
    def _render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, opening: bool
    ) -> str:
        """The text of exactly these messages and, with `opening`, the beginning of the next assistant turn."""

    @abstractmethod
    def _encode_text(self, text: str) -> tuple[int, ...]:
        """The ids of a text of the template, special tokens recognised and none added."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids, special tokens left out."""

    @abstractmethod
    def save(self, directory: Path) -> None:
        """Write the tokenizer's files, chat template included, into a model directory."""


class ByteTokens(Tokens):
    """A tokenizer without files: the 256 bytes of UTF-8, and one end-of-turn token that also pads."""

    EOS = 256
    VOCABULARY = 257

    def __init__(self, system_prompt: str = "") -> None:
        super().__init__(system_prompt)
        self.eos_ids = frozenset({self.EOS})
        self.pad_id = self.EOS
        self.context_length = None

    def _render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, opening: bool
    ) -> str:
        lines = [f"tool: {json.dumps(tool)}\n" for tool in tools]
        lines += [f"{message.get('role')}: {message.get('content') or ''}\n" for message in messages]
        return "".join([*lines, "assistant: " if opening else ""])

    def _encode_text(self, text: str) -> tuple[int, ...]:
        return tuple(text.encode(errors="replace"))

    def decode(self, ids: Sequence[int]) -> str:
        return bytes([i for i in ids if i < self.EOS]).decode(errors="replace")

    def save(self, directory: Path) -> None:
        """There is nothing to write: `model.tokenizer=bytes` says it all."""


class TemplateTokens(Tokens):
    """A transformers tokenizer with its chat template."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        system_prompt: str = "",
        template_kwargs: Mapping[str, Any] | None = None,
        model_eos_ids: frozenset[int] = frozenset(),
        context_length: int | None = None,
    ) -> None:
        super().__init__(system_prompt)
        self._tokenizer: Any = tokenizer
        self._template_kwargs = {key: _plain(value) for key, value in (template_kwargs or {}).items()}
        self.context_length = context_length
        self._specials = {
            str(each): int(number) for number, each in self._tokenizer.added_tokens_decoder.items() if each.special
        }
        ends = set(model_eos_ids) | self._end_of_turn()
        if tokenizer.eos_token_id is not None:
            ends.add(int(tokenizer.eos_token_id))
        if not ends:
            raise ConfigError(
                f"tokenizer '{tokenizer.name_or_path}': neither it nor the model names an end-of-sequence token, so no "
                "response could end; set eos_token in the tokenizer's files or eos_token_id in generation_config.json"
            )
        self.eos_ids = frozenset(ends)
        self.pad_id = int(tokenizer.pad_token_id) if tokenizer.pad_token_id is not None else min(ends)

    def _render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, opening: bool
    ) -> str:
        with boundary("the chat template (model.chat_template, model.chat_template_kwargs)", ConfigError):
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages),
                    tools=list(tools) or None,
                    tokenize=False,
                    add_generation_prompt=opening,
                    **self._template_kwargs,
                )
            )

    def _encode_text(self, text: str) -> tuple[int, ...]:
        return tuple(int(i) for i in self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True))

    def save(self, directory: Path) -> None:
        self._tokenizer.save_pretrained(directory)

    def _special_texts(self) -> Mapping[str, int]:
        return self._specials

    def _end_of_turn(self) -> set[int]:
        """The special token that the template puts behind an assistant's message; empty if it puts none."""
        from jinja2 import TemplateError

        conversation = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _END_PROBE}]
        try:
            text = self._tokenizer.apply_chat_template(conversation, tokenize=False, **self._template_kwargs)
        except (TemplateError, TypeError, KeyError, ValueError):
            return set()  # a template that refuses this conversation; the other sources of eos_ids remain
        _, found, tail = str(text).rpartition(_END_PROBE)
        first = self._tokenizer.encode(tail, add_special_tokens=False)[:1] if found else []
        added = self._tokenizer.added_tokens_decoder
        return {int(i) for i in first if i in added and added[i].special}


def load_tokens(model: ModelConfig, system_prompt: str) -> Tokens:
    """The tokens of a run.

    `eos_ids` are the tokenizer's end-of-sequence token, those of the model's generation configuration, and the
    end-of-turn token of the chat template. ConfigError when files or template are missing.
    """
    if model.tokenizer == BYTES:
        return ByteTokens(system_prompt)
    _require_directory(model.path)
    from transformers import AutoTokenizer

    name = model.tokenizer or model.path
    with boundary(f"tokenizer '{name}' (model.tokenizer, model.path)", ConfigError):
        tokenizer = AutoTokenizer.from_pretrained(name, revision=model.revision, trust_remote_code=False)
    if model.chat_template:
        with boundary(f"model.chat_template='{model.chat_template}'", ConfigError):
            tokenizer.chat_template = Path(model.chat_template).expanduser().read_text(encoding="utf-8")
    if not tokenizer.chat_template:
        raise ConfigError(
            f"tokenizer '{name}': it has no chat template, and prompts are conversations; name a Jinja file in "
            "model.chat_template"
        )
    model_eos_ids, context_length = _model_facts(model)
    return TemplateTokens(
        tokenizer,
        system_prompt=system_prompt,
        template_kwargs=model.chat_template_kwargs,
        model_eos_ids=model_eos_ids,
        context_length=context_length,
    )


def _require_directory(path: str) -> None:
    """ConfigError when `path` can only be a directory and is none, or is one without a model."""
    found = Path(path).expanduser()
    if found.is_dir():
        if not (found / "config.json").is_file():
            raise ConfigError(f"model.path: the directory '{path}' holds no model: needs one with a config.json")
    elif path.startswith(("/", ".", "~")) or found.exists():
        raise ConfigError(
            f"model.path: there is no directory '{path}' (looked for {found.absolute()}); needs a model directory, or "
            "a name on the Hub such as HuggingFaceTB/SmolLM2-135M-Instruct"
        )


def _model_facts(model: ModelConfig) -> tuple[frozenset[int], int | None]:
    """(end-of-sequence ids, context length) that the model's own configuration files state."""
    from transformers import AutoConfig, GenerationConfig

    with boundary(f"model.path='{model.path}'", ConfigError):
        config = AutoConfig.from_pretrained(model.path, revision=model.revision, trust_remote_code=False)
    try:
        stated = GenerationConfig.from_pretrained(model.path, revision=model.revision).eos_token_id
    except OSError:  # the file is optional
        stated = getattr(config.get_text_config(), "eos_token_id", None)
    ids = stated if isinstance(stated, list) else [stated]
    window = getattr(config.get_text_config(), "max_position_embeddings", None)
    return frozenset(int(i) for i in ids if i is not None), int(window) if window else None


def _after_probe(text: str) -> str:
    """What the template wrote behind the response."""
    _, found, rest = text.partition(_END_PROBE)
    if not found:
        raise ConfigError(
            "chat template: it leaves out the assistant's turn; needs one that keeps it (model.chat_template)"
        )
    return rest


def _plain(value: Any) -> Any:
    """Mappings and sequences as dicts and lists, all the way down: templates test for those types."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value
