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
    layers: Sequence[LayerStates]
    """By layer, (1, h, tokens, D)."""


class KeptTurns:
    """Turns whose conversations may continue. They and the slots of live rows have at most `most` tokens together."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._turns: list[KeptTurn] = []
        self._total = 0

    def has_room(self, num: int, slots: int) -> bool:
        """True if a turn of that many tokens fits, when live rows have `slots`."""
        return num + slots <= self._most

    def keep(self, turn: KeptTurn, slots: int) -> None:
        """Keep a turn instead of the oldest that do not fit with it."""
        self._turns.append(turn)
        self._total += len(turn.token_ids)
        self.shrink(slots)

    def shrink(self, slots: int) -> None:
        """Drop the oldest turns until the others fit."""
        while self._turns and self._total + slots > self._most:
            self._total -= len(self._turns.pop(0).token_ids)

    def taken(self, token_ids: Sequence[int]) -> KeptTurn | None:
        """The longest turn with which these tokens begin, which is then no longer kept; one token at least is new."""
        if not self._turns:
            return None
        ids, best = np.array(token_ids, dtype=np.int32), None
        for turn in self._turns:
            num = len(turn.token_ids)
            is_longer = best is None or num > len(best.token_ids)
            if is_longer and num < len(ids) and np.array_equal(ids[:num], turn.token_ids):
                best = turn
        if best is not None:
            self._turns.remove(best)
            self._total -= len(best.token_ids)
        return best

    def forget(self) -> None:
        """Drop all turns, such as when the weights change."""
        self._turns.clear()
        self._total = 0
