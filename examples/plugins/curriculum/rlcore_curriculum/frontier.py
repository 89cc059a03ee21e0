"""The order: stride scheduling, in which a row's share is how much its last group could teach."""

import hashlib
import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlcore import option
from rlcore.contracts.prompt_orders import OrderContext, PromptOrder, RowResults


@dataclass(frozen=True)
class CurriculumSection:
    """Settings of the order `frontier`."""

    least_share: float = option(0.1, above=0, below=1)
    """Frequency of a prompt that is always or never solved, relative to one that is solved half the time."""


class Frontier(PromptOrder):
    """A row is due one stride after it was last due; its stride is 1 / 4p(1-p) for p, the share of its last group that
    solved it, and 1 / `least_share` at most.

    Rows come equally often at first. Those that are always or never solved then stay away for 1 / `least_share` times
    as long, are tried again, and come as often as others once some samples solve them.
    """

    def __init__(self, context: OrderContext) -> None:
        super().__init__(context)
        self._least_share = context.settings(CurriculumSection).least_share
        rows = [prompt.id for prompts in context.prompts.values() for prompt in prompts]
        self._place = {row: self._hash(row) for row in rows}
        """Decides between rows that are due at the same time."""
        self._last_due: dict[str, float] = {}
        """Of the rows that were issued."""

    def _hash(self, row: str) -> bytes:
        return hashlib.sha256(f"{self.context.seed}\0{row}".encode()).digest()

    def next(self, n: int, results: Mapping[str, RowResults]) -> Sequence[str]:
        """The `n` rows that are due first; more than there are go round."""

        def due(row: str) -> tuple[float, bytes]:
            if row not in self._last_due:
                return 0.0, self._place[row]
            return self._last_due[row] + self._stride(results.get(row)), self._place[row]

        first = heapq.nsmallest(n, self._place, key=due)
        self._last_due |= {row: due(row)[0] for row in first}
        return [first[number % len(first)] for number in range(n)]

    def _stride(self, results: RowResults | None) -> float:
        if results is None:  # in flight: it may be worth as much as any
            return 1.0
        solved = results.last_solved_frac
        return 1.0 / max(self._least_share, 4.0 * solved * (1.0 - solved))

    def state(self) -> dict[str, Any]:
        """Times at which rows were last due."""
        return {"last_due": dict(self._last_due)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue there."""
        self._last_due = dict(state["last_due"])
