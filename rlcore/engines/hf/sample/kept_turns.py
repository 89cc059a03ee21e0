"""Keys and values of finished turns, so that the next turn of a conversation computes only what is new.

A turn is found by its tokens: it helps every request that begins with them. Turns that were kept first are dropped
first.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlcore.engines.hf.sample.kv_cache import LayerStates
from rlcore.types import Int32s


@dataclass(frozen=True, eq=False)
class KeptTurn:
    """The tokens of a conversation up to the last one that was sampled, which no pass has read."""

    token_ids: Int32s
    layers: list[LayerStates]
    """By layer, (1, h, tokens, D)."""


class KeptTurns:
    """Turns whose conversations may continue, while they and the slots of live rows have at most `most` tokens."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._turns: list[KeptTurn] = []
        self._total = 0

    def make_room(self, num: int, slots: int) -> bool:
        """Drop the oldest turns until one of `num` tokens fits, when live rows have `slots`; False if it cannot."""
        if num + slots > self._most:
            return False
        self.shrink(num + slots)
        return True

    def keep(self, turn: KeptTurn) -> None:
        """Keep a turn for which there is room."""
        self._turns.append(turn)
        self._total += len(turn.token_ids)

    def shrink(self, slots: int) -> None:
        """Drop the oldest turns until the others fit."""
        while self._turns and self._total + slots > self._most:
            self._total -= len(self._turns.pop(0).token_ids)

    def taken(self, token_ids: Sequence[int]) -> KeptTurn | None:
        """The longest turn with which these tokens begin, which is then no longer kept.

        At least one token is new, and at most half of them: with more, computing all at once is faster.
        """
        if not self._turns:
            return None
        ids, least, best = np.array(token_ids, dtype=np.int32), (len(token_ids) + 1) // 2, None
        for turn in self._turns:
            num = len(turn.token_ids)
            if num < least or num >= len(ids) or turn.token_ids[-1] != ids[num - 1]:
                continue
            if np.array_equal(ids[:num], turn.token_ids):
                best, least = turn, num + 1
        if best is not None:
            self._turns.remove(best)
            self._total -= len(best.token_ids)
        return best

    def forget(self) -> None:
        """Drop all turns, such as when the weights change."""
        self._turns.clear()
        self._total = 0
