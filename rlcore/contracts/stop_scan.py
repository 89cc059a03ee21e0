"""Finds stop strings as tokens come, without decoding everything again."""

from collections.abc import Callable, Sequence

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""The decoder's replacement for a character whose last bytes are missing."""


class StopScan:
    """Finds the first complete stop string in the text of a growing row.

    The text is decoded in pieces that end between two characters. Each piece is decoded together with the previous one,
    whose tokens decide about spaces, so each token is decoded about three times in total.
    """

    def __init__(self, stop: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        self._stop = tuple(text for text in stop if text)
        self._decode = decode
        self._reach = max(map(len, self._stop), default=1) - 1
        self._tail = ""
        """The end of the settled text, in which a stop string may have begun."""
        self._context = 0
        """The first token of the last settled piece."""
        self._settled = 0
        """Tokens whose text is settled."""
        self._context_text = ""

    def found(self, token_ids: Sequence[int]) -> bool:
        """True if a stop string is complete. Call it after every token, with all tokens so far."""
        if not self._stop:
            return False
        text = self._decode(token_ids[self._context :])
        fresh = text[len(self._context_text) :]
        seen = self._tail + fresh.rstrip(_INCOMPLETE)
        if any(text in seen for text in self._stop):
            return True
        if fresh and not fresh.endswith(_INCOMPLETE):
            self._tail = seen[max(0, len(seen) - self._reach) :]
            self._context, self._settled = self._settled, len(token_ids)
            self._context_text = self._decode(token_ids[self._context :])
        return False
