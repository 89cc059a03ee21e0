"""The only owner of tokenizer and chat template: text becomes token ids here, and only once.

`load_tokens` reads `model` and `data.system_prompt`. All other code gets a `Tokens` from the build context.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcore.config import ModelConfig
from rlcore.config.sections import BYTES as BYTES
from rlcore.contracts.foreign_text import ForeignText
from rlcore.contracts.model_files import check_model_files, check_settings
from rlcore.contracts.templates import TemplateRefused, render
from rlcore.data.chat_template import read_chat_template
from rlcore.errors import ConfigError, boundary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

from rlcore.contracts.tokens import END_PROBE, Tokens
from rlcore.types import plain

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""The spelling of a byte that has no token."""


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

    def piece(self, id_: int) -> bytes:
        return bytes([id_]) if 0 <= id_ < self.EOS else b"<|end|>"

    def save(self, directory: Path) -> None:
        """Write nothing: `model.tokenizer=bytes` is enough to load it."""


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
        vocabulary: int | None = None,
    ) -> None:
        """`vocabulary`: the model's ids are below this number; None: unknown."""
        super().__init__(system_prompt)
        self._tokenizer: Any = tokenizer
        self._byte_of = _byte_letters(tokenizer)
        self._template_kwargs = {key: plain(value) for key, value in (template_kwargs or {}).items()}
        keys = " (model.chat_template, model.chat_template_kwargs)"
        self._foreign = ForeignText(tokenizer, self._template_kwargs, ways_out=keys)
        self._last_tools: tuple[str, Any] = ("", None)
        """Schemas as text, and without spellings of markers."""
        self.context_length = context_length
        self._specials = {
            str(token): int(number) for number, token in self._tokenizer.added_tokens_decoder.items() if token.special
        }
        ends = set(model_eos_ids) | self._end_of_turn()
        if tokenizer.eos_token_id is not None:
            ends.add(int(tokenizer.eos_token_id))
        self.eos_ids = frozenset(id_ for id_ in ends if _is_known(id_, vocabulary))
        if not self.eos_ids:
            found = f"below {vocabulary}, the model's vocabulary, among {sorted(ends)}" if ends else "in any file"
            raise ConfigError(
                f"tokenizer '{tokenizer.name_or_path}': found no end-of-sequence token {found}, so no response could "
                "end; set eos_token in the tokenizer's files or eos_token_id in generation_config.json"
            )
        pad = tokenizer.pad_token_id
        self.pad_id = int(pad) if pad is not None and _is_known(int(pad), vocabulary) else min(self.eos_ids)

    def _render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, opening: bool
    ) -> str:
        return render(
            self._tokenizer,
            self._foreign.guarded(messages),
            self._foreign.whose,
            tools=self._guarded_tools(tools) or None,
            add_generation_prompt=opening,
            **self._template_kwargs,
        )

    def _guarded_tools(self, tools: Sequence[Mapping[str, Any]]) -> Any:
        """The schemas without spellings of markers. Most prompts of a run have the same ones as the last prompt."""
        written = repr(tools)  # equal values may be written otherwise: 1 and True, keys in another order
        last, guarded = self._last_tools
        if written != last:
            guarded = self._foreign.guarded(tools)
            self._last_tools = (written, guarded)
        return guarded

    def _encode_text(self, text: str) -> tuple[int, ...]:
        return tuple(self._foreign.encode(text))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True))

    def piece(self, id_: int) -> bytes:
        token = self._tokenizer.convert_ids_to_tokens(int(id_))
        if token is None:
            return b""
        if id_ in self._tokenizer.added_tokens_decoder:
            return str(token).encode()
        if self._byte_of:
            return bytes(self._byte_of[letter] for letter in token if letter in self._byte_of)
        if byte := _BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(byte[1])
        return str(token).replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()

    def save(self, directory: Path) -> None:
        self._tokenizer.save_pretrained(directory)

    def ids(self) -> Mapping[str, int]:
        """The id of each token by its spelling in the tokenizer's files."""
        known: Mapping[str, int] = self._tokenizer.get_vocab()
        return known

    def _special_texts(self) -> Mapping[str, int]:
        return self._specials

    def _end_of_turn(self) -> set[int]:
        """The special token that the template puts after an assistant's message; empty if there is none."""
        conversation = [{"role": "user", "content": "x"}, {"role": "assistant", "content": END_PROBE}]
        try:
            text = self._render(conversation, (), opening=False)
        except TemplateRefused:
            return set()  # the template refuses this conversation; eos_ids has other sources
        _, found, tail = text.rpartition(END_PROBE)
        first = self._tokenizer.encode(tail, add_special_tokens=False)[:1] if found else []
        added = self._tokenizer.added_tokens_decoder
        return {int(i) for i in first if i in added and added[i].special}


def _is_known(id_: int, vocabulary: int | None) -> bool:
    """True if the model has the id; it does not have tokens that were added only to the tokenizer."""
    return id_ >= 0 and (vocabulary is None or id_ < vocabulary)


def _byte_letters(tokenizer: Any) -> Mapping[str, int]:
    """The byte of each letter in the tokens of a byte-level tokenizer; empty for other tokenizers."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or "ByteLevel" not in repr(backend.decoder):
        return {}
    letters: Mapping[int, str] = bytes_to_unicode()  # type: ignore[no-untyped-call]
    return {letter: byte for byte, letter in letters.items()}


def load_tokens(model: ModelConfig, system_prompt: str) -> Tokens:
    """The tokens of a run.

    `eos_ids` holds the tokenizer's end-of-sequence token, those of the model's generation configuration, and the
    end-of-turn token of the chat template. ConfigError if files or template are missing.
    """
    if model.tokenizer == BYTES:
        return ByteTokens(system_prompt)
    require_directory(model.path)
    template = read_chat_template(model.chat_template) if model.chat_template else ""
    from transformers import AutoTokenizer

    name = model.tokenizer or model.path
    with boundary(f"tokenizer '{name}' (model.tokenizer, model.path)", ConfigError):
        check_model_files(f"tokenizer '{name}' (model.tokenizer, model.path)", Path(name))
        tokenizer = AutoTokenizer.from_pretrained(name, revision=model.revision, trust_remote_code=False)
    if template:
        tokenizer.chat_template = template
    if not tokenizer.chat_template:
        raise ConfigError(
            f"tokenizer '{name}': it has no chat template, and prompts are conversations; name a Jinja file in "
            "model.chat_template"
        )
    model_eos_ids, context_length, vocabulary = _model_facts(model)
    return TemplateTokens(
        tokenizer,
        system_prompt=system_prompt,
        template_kwargs=model.chat_template_kwargs,
        model_eos_ids=model_eos_ids,
        context_length=context_length,
        vocabulary=vocabulary,
    )


def check_reference_ids(tokens: Tokens, path: str) -> None:
    """ConfigError if the tokenizer of the reference at `path` gives another id to a token of the policy, or none.

    A local directory without a tokenizer is not checked.
    """
    directory = Path(path).expanduser()
    if not isinstance(tokens, TemplateTokens) or (directory.is_dir() and not any(directory.glob("tokenizer*.json"))):
        return
    from transformers import AutoTokenizer

    with boundary(f"reference.path='{path}': its tokenizer", ConfigError):
        check_model_files(f"reference.path='{path}'", directory)
        known: Mapping[str, int] = AutoTokenizer.from_pretrained(path, trust_remote_code=False).get_vocab()
    ids = tokens.ids()
    if wrong := [token for token, id_ in ids.items() if known.get(token) != id_]:
        first = min(wrong, key=ids.__getitem__)
        there = f"has id {known[first]}" if first in known else "does not exist"
        raise ConfigError(
            f"reference.path='{path}': {len(wrong)} of the policy's {len(ids)} tokens have other ids or none "
            f"in its tokenizer, such as {first!r}, which has id {ids[first]} and there {there}; needs a model "
            "with the tokenizer of model.path"
        )


def require_directory(path: str) -> None:
    """ConfigError if `path` can only be a directory but does not exist, or is one without a model, or whose config.json
    is damaged."""
    found = Path(path).expanduser()
    if found.is_dir():
        if not (found / "config.json").is_file():
            raise ConfigError(f"model.path: the directory '{path}' holds no model: needs one with a config.json")
        check_settings("model.path", path, found)
    elif path.startswith(("/", ".", "~")) or path.count("/") > 1 or found.exists():
        raise ConfigError(
            f"model.path: found no directory '{path}' (looked for {found.absolute()}); needs a model directory, or "
            "a name on the Hub such as HuggingFaceTB/SmolLM2-135M-Instruct"
        )


def _model_facts(model: ModelConfig) -> tuple[frozenset[int], int | None, int | None]:
    """(end-of-sequence ids, context length, size of the vocabulary) that the model's own configuration files state."""
    from transformers import AutoConfig, GenerationConfig

    with boundary(f"model.path='{model.path}'", ConfigError):
        check_model_files(f"model.path='{model.path}'", Path(model.path))
        config = AutoConfig.from_pretrained(model.path, revision=model.revision, trust_remote_code=False)
    text = config.get_text_config()
    with boundary(f"model.path='{model.path}': generation_config.json", ConfigError):
        try:
            stated = GenerationConfig.from_pretrained(model.path, revision=model.revision).eos_token_id
        except OSError:  # the file is optional
            stated = getattr(text, "eos_token_id", None)
    ids = stated if isinstance(stated, list) else [stated]
    window, vocabulary = (getattr(text, name, None) for name in ("max_position_embeddings", "vocab_size"))
    with boundary(f"model.path='{model.path}': eos_token_id, max_position_embeddings, vocab_size", ConfigError):
        ends = frozenset(int(i) for i in ids if i is not None)
        return ends, int(window) if window else None, int(vocabulary) if vocabulary else None
