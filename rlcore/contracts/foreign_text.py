"""Encodes special tokens that are spelled in text from outside a run as plain text.

Prompts, tools, environments and agents may write anything into a conversation, and a tokenizer reads `<|im_end|>` as
the end of a turn anywhere. So such spellings are split before a template renders them. Afterwards they are joined
again, and a twin of the tokenizer encodes them. The twin has other names for special tokens, which no text can spell.
"""

import json
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import pairwise
from typing import Any

from rlcore.contracts.templates import TemplateRefused, render

GUARD = "\ufdd0"
"""Splits a spelling. Unicode guarantees that this code point is never a character, so other text does not contain
it."""
_ANSWER = "rlcore0answer"
_USER, _ASSISTANT = {"role": "user", "content": "x"}, {"role": "assistant", "content": _ANSWER}
_SYSTEM, _TOOL = {"role": "system", "content": "x"}, {"role": "tool", "name": "x", "content": "y"}


class ForeignText:
    """Keeps the markers of a tokenizer out of foreign text.

    Its special tokens are markers. Other added tokens are markers if the chat template uses them to mark messages of
    users, the system and tools, or to open an answer. Tokens within an answer, such as `<think>`, are not markers: a
    conversation that quotes an answer is tokenised as the answer was.
    """

    def __init__(self, tokenizer: Any, arguments: Mapping[str, Any] | None = None, *, ways_out: str = "") -> None:
        """`arguments` are those of every rendering; `ways_out` names the keys that choose the template."""
        self.tokenizer, self._arguments = tokenizer, dict(arguments or {})
        self.whose = f"the chat template of '{tokenizer.name_or_path}'{ways_out}"
        """Names the template in errors."""

    def guarded(self, value: Any) -> Any:
        """The messages or tool schemas with every spelling of a marker split.

        The start or end of a text that could be half a marker is separated from its neighbour. A lone surrogate, which
        a tokenizer rejects, becomes a question mark.
        """
        if isinstance(value, str):
            return self._parted(_encodable(value))
        if isinstance(value, Mapping):
            return {self.guarded(key): self.guarded(inner) for key, inner in value.items()}
        return [self.guarded(inner) for inner in value] if isinstance(value, (list, tuple)) else value

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """The ids of a rendered text; if nothing was split in it, those of the tokenizer itself."""
        if GUARD in text:
            ids = self._twin.encode(text) if self._twin is not None and self._twin.exact else None
            if ids is not None:
                before, behind = self._around if add_special_tokens else ([], [])
                return [*before, *ids, *behind]
            text = text.replace(GUARD, " ")  # no twin: the parts stay split
        return [int(id_) for id_ in self.tokenizer.encode(text, add_special_tokens=add_special_tokens)]

    def _parted(self, text: str) -> str:
        if not self._markers:
            return text
        cuts = {found.start() + 1 for found in self._spelled.finditer(text)}
        if self._normalises:
            encoding = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
            places = zip(encoding.ids, encoding.offsets, strict=True)
            cuts |= {start + 1 for id_, (start, _) in places if id_ in self._markers.values()}
        sizes = range(1, 1 + min(len(text), self._longest))
        # Most texts have no character there that ends or begins a marker, so the slices are rarely made.
        if not self._last_letters.isdisjoint(text[: self._longest]):
            cuts |= {0} if any(text[:size] in self._endings for size in sizes) else set()
        if not self._first_letters.isdisjoint(text[-self._longest :]):
            cuts |= {len(text)} if any(text[-size:] in self._beginnings for size in sizes) else set()
        return GUARD.join(text[start:end] for start, end in pairwise([0, *sorted(cuts), len(text)])) if cuts else text

    @cached_property
    def _markers(self) -> Mapping[str, int]:
        """The id of each marker by its spelling."""
        added = {str(token): (int(id_), token.special) for id_, token in self.tokenizer.added_tokens_decoder.items()}
        plain = [text for text, (_, special) in added.items() if not special and any(map(str.isalnum, text))]
        written = self._written(plain, added) if plain else set()
        return {text: id_ for text, (id_, special) in added.items() if len(text) > 1 and (special or text in written)}

    def _written(self, plain: Iterable[str], added: Iterable[str]) -> set[str]:
        """The plain added tokens with which the template marks messages or begins to open an answer."""
        closed, opened = self._rendered(_USER), self._rendered(_USER, add_generation_prompt=True)
        behind_answer = self._rendered(_USER, _ASSISTANT, _TOOL).partition(_ANSWER)[2]
        marked = (closed, self._rendered(_SYSTEM, _USER), behind_answer)
        opening = opened.removeprefix(closed)
        first = min((text for text in added if text in opening), key=opening.index, default=None)
        return {text for text in plain if text == first or any(text in part for part in marked)}

    def _rendered(self, *messages: Mapping[str, str], **arguments: Any) -> str:
        if not self.tokenizer.chat_template:
            return ""
        try:
            return render(self.tokenizer, list(messages), self.whose, **{**self._arguments, **arguments})
        except TemplateRefused:
            return ""  # a template that refuses these messages has no markers for them

    @cached_property
    def _spelled(self) -> re.Pattern[str]:
        """Matches the empty string before each marker, so overlapping markers are both found."""
        return re.compile(f"(?=(?:{_any_of(self._markers)}))")

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._markers)) - 1

    @cached_property
    def _first_letters(self) -> frozenset[str]:
        return frozenset(text[0] for text in self._markers)

    @cached_property
    def _last_letters(self) -> frozenset[str]:
        return frozenset(text[-1] for text in self._markers)

    @cached_property
    def _beginnings(self) -> frozenset[str]:
        return frozenset(text[:size] for text in self._markers for size in range(1, len(text)))

    @cached_property
    def _endings(self) -> frozenset[str]:
        return frozenset(text[size:] for text in self._markers for size in range(1, len(text)))

    @cached_property
    def _normalises(self) -> bool:
        """True if the tokenizer normalises another spelling to a marker."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        known = self.tokenizer.added_tokens_decoder
        return getattr(backend, "normalizer", None) is not None and any(
            known[id_].normalized for id_ in self._markers.values()
        )

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """The ids that the tokenizer adds before and after a text."""
        bare, whole = (list(self.tokenizer.encode("x", add_special_tokens=add)) for add in (False, True))
        start = next(place for place in range(len(whole)) if whole[place : place + len(bare)] == bare)
        return whole[:start], whole[start + len(bare) :]

    @cached_property
    def _twin(self) -> "_Twin | None":
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        return None if backend is None else _Twin(backend, self._markers)


class _Twin:
    """A tokenizer that knows its markers by other names; their spellings are text to it."""

    def __init__(self, backend: Any, markers: Mapping[str, int]) -> None:
        from tokenizers import Tokenizer

        state = {**json.loads(backend.to_str()), "truncation": None, "padding": None}
        id_of = {}
        for token in state["added_tokens"]:
            if token["content"] in markers:
                token["content"] = _name(token["id"])
            id_of[token["content"]] = int(token["id"])
        self._tokenizer: Any = Tokenizer.from_str(json.dumps(state))
        self._markers = markers
        self._own = re.compile(f"({_any_of(markers)})")
        # added tokens outside the vocabulary get other numbers
        number_of = {name: self._tokenizer.token_to_id(name) for name in id_of}
        self._id_of = {number_of[name]: id_ for name, id_ in id_of.items()}
        self._from_text = set(markers.values()) - self._id_of.keys()
        renumbered = {number for name, number in number_of.items() if number != id_of[name]}
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=False).values()
        self.exact = len(self._id_of) == len(id_of) and renumbered.isdisjoint(vocabulary)
        """True if each of its ids corresponds to one of the tokenizer's."""

    def encode(self, text: str) -> list[int] | None:
        """The ids of a text whose real markers are whole and whose foreign ones are split.

        None if a foreign one still became a marker, as a word of the vocabulary.
        """
        pieces = self._own.split(text)
        named = [
            _name(self._markers[piece]) if place % 2 else piece.replace(GUARD, "") for place, piece in enumerate(pieces)
        ]
        ids = self._tokenizer.encode("".join(named), add_special_tokens=False).ids
        return None if self._from_text.intersection(ids) else [self._id_of.get(id_, id_) for id_ in ids]


def _encodable(text: str) -> str:
    return text if text.isascii() else text.encode(errors="replace").decode()


def _any_of(texts: Iterable[str]) -> str:
    """A regular expression that matches any of these texts, the longest first, as tokenizers do."""
    return "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True))


def _name(id_: int) -> str:
    """The twin's name for a marker. No text contains it, because guards are removed from texts."""
    return f"{GUARD}{id_}{GUARD}"
