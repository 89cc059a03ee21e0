"""The tokenizer and chat template of a run, as components use them."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rlcore.errors import ConfigError
from rlcore.types import Message
from rlcore.types import plain as plain_message

END_PROBE = "rlcore0end0probe"
"""A text that no chat template contains. It is rendered as a response to find the text that follows one."""


MAX_TEMPLATE_TOKENS = 64
"""An upper bound on what a template puts around one message."""

_QUESTION = {"role": "user", "content": "x"}


_THOUGHT = f"<think>\nx\n</think>\n\n{END_PROBE}"
"""A response of the kind that some templates shorten when other messages follow."""


class Tokens(ABC):
    """Converts prompts to token ids, and token ids to text."""

    eos_ids: frozenset[int]
    """Tokens that end a response."""
    pad_id: int
    """Padding at the end of a row; no mask selects it."""
    context_length: int | None
    """Size of the model's context window in tokens; None: unknown."""

    def __init__(self, system_prompt: str = "") -> None:
        self._system_prompt = system_prompt
        self._num_end: int | None = None

    def encode_prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> tuple[int, ...]:
        """The ids of the conversation and the opening of the next assistant turn.

        The system prompt comes first if the conversation lacks a system message. `tools` are schemas in OpenAI's form,
        for templates that show them to the model. Special tokens spelled in a message or a schema stay text.
        """
        plain = [plain_message(message) for message in messages]
        if self._system_prompt and not any(message.get("role") == "system" for message in plain):
            plain.insert(0, {"role": "system", "content": self._system_prompt})
        return self._encode_text(self._render(plain, [plain_message(tool) for tool in tools], opening=True))

    def continuation(self, messages: Sequence[Message], last_id: int) -> tuple[int, ...]:
        """The ids to append to an assistant turn whose last sampled id is `last_id`.

        They are the end of that turn (unless `last_id` ended it), `messages`, and the opening of the next assistant
        turn. The separators of the chat template are included. Earlier text is not tokenised. Instead, the template
        renders a short conversation with the same messages, and the ids are those of the text after its response.
        ConfigError when the template leaves responses out; `check_continuation` finds other problems.
        """
        answer = {"role": "assistant", "content": END_PROBE}
        text = self._render([_QUESTION, answer, *(plain_message(message) for message in messages)], (), opening=True)
        ids = self._encode_text(_after_probe(text))
        return ids[self._end_of_turn_length() :] if last_id in self.eos_ids else ids

    def _end_of_turn_length(self) -> int:
        """The number of ids from the end of a response to the token that ends its turn; 0 without such a token."""
        if self._num_end is None:
            answer = {"role": "assistant", "content": END_PROBE}
            ids = self._encode_text(_after_probe(self._render([_QUESTION, answer], (), opening=False)))
            ends = [place for place, id_ in enumerate(ids) if id_ in self.eos_ids]
            self._num_end = ends[0] + 1 if ends else 0
        return self._num_end

    def check_continuation(self, roles: Sequence[str], tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """ConfigError naming the first role of `roles`, or `assistant`, that makes the template rewrite earlier text.

        A template is prefix-stable if a conversation with one more message begins with the conversation without it. An
        assistant's message must also begin with the opening of its turn. With any other template, the policy's context
        in training differs from the template's text elsewhere. With `tools`, which are schemas in OpenAI's form, the
        same must hold if the template shows them. Tools must not change how a message is written: some templates put
        them before the last user message.
        """
        schemas = [plain_message(tool) for tool in tools]
        way_out = "needs a chat template that only appends (model.chat_template names a file with one)"
        opened = self._render([_QUESTION], schemas, opening=True)
        for probe in (END_PROBE, _THOUGHT):
            answered = [_QUESTION, {"role": "assistant", "content": probe}]
            before = self._render(answered, schemas, opening=False)
            if probe == END_PROBE and not (before.startswith(opened) and probe in before):
                raise ConfigError(
                    "chat template: the role 'assistant' breaks it: a response does not follow the opening of its "
                    f"turn exactly as it was sampled; {way_out}"
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
                    and probe == END_PROBE
                    and _after_probe(after) != _after_probe(self._render(more, (), opening=True))
                ):
                    raise ConfigError(
                        f"chat template: the role '{role}' breaks it: a message of this role is written otherwise when "
                        f"there are tools; {way_out}"
                    )

    def tells_tools(self) -> bool:
        """True if the chat template shows tools to the model."""
        tool = {"type": "function", "function": {"name": END_PROBE, "description": "", "parameters": {}}}
        return END_PROBE in self._render([_QUESTION], [tool], opening=True)

    def check_stop(self, stop: Sequence[str], who: str = "rollout.stop") -> None:
        """ConfigError naming the first stop string that cannot occur in a response.

        Such a string holds the spelling of a special token: that is sampled as the token, which `decode` leaves out.
        """
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
                f"{who}: the string {text!r} holds '{hidden}', a special token; those are not part of a "
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
        """The ids of a rendered text. Special tokens in it are recognised; none are added."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids, without special tokens."""

    def piece(self, id_: int) -> bytes:
        """The bytes of a token in a text, also of a special token; the joined bytes of a text's tokens are the text.

        By default each token is decoded alone, so a character that spans several tokens is lost.
        """
        return self.decode([id_]).encode()

    @abstractmethod
    def save(self, directory: Path) -> None:
        """Write the tokenizer's files, including the chat template, into a model directory."""


class EncodesPrompts(Protocol):
    """The one method of `Tokens` that counting prompts needs."""

    def encode_prompt(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[int, ...]: ...


class PromptBound:
    """Upper bounds of the tokens of prompts, found without tokenising each.

    Schemas have most of the tokens, and most prompts have the same ones: they are tokenised once, with a short prompt.
    """

    def __init__(self, tokens: EncodesPrompts) -> None:
        self._tokens = tokens
        self._short: dict[str, int] = {}
        """Tokens of a short prompt with schemas, by what they say: agents may build new ones for each prompt."""

    def of(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> int:
        """The tokens of a short prompt with these schemas, plus a token for each byte of the messages.

        A token has at least one byte, and `repr` writes out more of a message than a chat template does.
        """
        around = sum(len(repr(dict(message)).encode(errors="replace")) + MAX_TEMPLATE_TOKENS for message in messages)
        key = repr(tools)
        if key not in self._short:
            short: Message = {"role": "user", "content": "x"}
            self._short[key] = len(self._tokens.encode_prompt([short], tools))
        return self._short[key] + around


def _after_probe(text: str) -> str:
    """The text that the template appends to the response."""
    _, found, rest = text.partition(END_PROBE)
    if not found:
        raise ConfigError(
            "chat template: it leaves out the assistant's turn; needs one that keeps it (model.chat_template)"
        )
    return rest
