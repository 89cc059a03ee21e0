"""Keys and values of finished turns, so that the next turn of a conversation computes only what is new.

A turn is found by its tokens: it helps every request that begins with them. Conversations that begin with the same
prompt share it. Turns that were kept first are dropped first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rlcore.engines.hf.sample.decode_row import DecodeGroup
from rlcore.engines.hf.sample.kv_cache import LayerStates
from rlcore.types import Int32s


@dataclass(eq=False)
class KeptPrompt:
    """The prompt of at least one turn."""

    group: DecodeGroup
    layers: list[LayerStates]
    """By layer, (1, h, tokens, D)."""
    num_turns: int = 0
    """Kept turns that begin with it."""

    def last_copy(self) -> list[LayerStates]:
        """The layers, for a reader that frees them one by one; they stay if other turns need them."""
        return list(self.layers) if self.num_turns else self.layers


@dataclass(frozen=True, eq=False)
class KeptTurn:
    """The tokens of a conversation up to the last one that was sampled, which no pass has read."""

    prompt: KeptPrompt
    token_ids: Int32s
    layers: list[LayerStates]
    """By layer, (1, h, tokens after the prompt, D)."""

    @property
    def num_own(self) -> int:
        """Tokens after the prompt."""
        return len(self.token_ids) - len(self.prompt.group.token_ids)


class KeptTurns:
    """Turns whose conversations may continue, while they and the slots of live rows have at most `most` tokens."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._turns: list[KeptTurn] = []
        self._prompts: dict[DecodeGroup, KeptPrompt] = {}
        self.num_tokens = 0
        """Of turns and prompts."""

    def make_room(self, group: DecodeGroup, own: int, slots: int) -> bool:
        """Drop the oldest turns until one with `own` tokens after its prompt fits, when live rows have `slots`; False
        if it cannot."""
        if len(group.token_ids) + own + slots > self._most:
            return False
        while self.num_tokens + self._missing(group) + own + slots > self._most:
            self._drop(self._turns[0])
        return True

    def keep(
        self, group: DecodeGroup, token_ids: Int32s, layers: list[LayerStates], prompt: Callable[[], list[LayerStates]]
    ) -> None:
        """Keep a turn for which there is room; `prompt` copies the prompt, if it is not kept yet."""
        self.num_tokens += self._missing(group) + len(token_ids) - len(group.token_ids)
        if group not in self._prompts:
            self._prompts[group] = KeptPrompt(group, prompt())
        self._prompts[group].num_turns += 1
        self._turns.append(KeptTurn(self._prompts[group], token_ids, layers))

    def shrink(self, slots: int) -> None:
        """Drop the oldest turns until the others fit."""
        while self._turns and self.num_tokens + slots > self._most:
            self._drop(self._turns[0])

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
            self._drop(best)
        return best

    def forget(self) -> None:
        """Drop all turns, such as when the weights change."""
        self._turns.clear()
        self._prompts.clear()
        self.num_tokens = 0

    def _missing(self, group: DecodeGroup) -> int:
        """Tokens of its prompt if that is not kept."""
        return 0 if group in self._prompts else len(group.token_ids)

    def _drop(self, turn: KeptTurn) -> None:
        self._turns.remove(turn)
        self.num_tokens -= turn.num_own
        turn.prompt.num_turns -= 1
        if not turn.prompt.num_turns:
            del self._prompts[turn.prompt.group]
            self.num_tokens -= len(turn.prompt.group.token_ids)
