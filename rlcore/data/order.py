"""The core's order of training prompts: seeded, mixed by weight, and stored as a few numbers.

*Mixing.* The next prompt comes from the source that is furthest behind its share: the one with the least
(issued + 1/2) / weight, ties by name (Webster's method). Shares hold at every moment, not only on average, and nothing
is random.

*Within a source.* Each epoch is a new permutation: prompts sorted by a hash of (seed, source, epoch, index). It depends
on nothing else. So the position is one number per source, and no library's random generator can change it.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlcore.contracts.prompt_orders import OrderContext, PromptOrder, PromptOrderOffer, RowResults
from rlcore.errors import CheckpointError, ConfigError, shown
from rlcore.types import Prompt


class SeededOrder(PromptOrder):
    """Issues every prompt of a source once per epoch, and sources by weight.

    A call returns a row twice if an epoch of its source ends within the call.
    """

    def __init__(self, context: OrderContext) -> None:
        """ConfigError if a weight is not above 0."""
        super().__init__(context)
        weights = {name: source.weight for name, source in context.data.sources.items()}
        self._sources = [
            _Source(name, context.prompts[name], weights.get(name, 1.0), context.seed, context.data.shuffle)
            for name in sorted(context.prompts)
        ]

    def next(self, n: int, results: Mapping[str, RowResults]) -> Sequence[str]:
        """The next `n` rows; ignores results."""
        return [min(self._sources, key=_Source.due).next_row() for _ in range(n)]

    def state(self) -> dict[str, Any]:
        """The number of prompts issued of each source."""
        return {
            "shuffle": self.context.data.shuffle,
            "issued": {source.name: source.issued for source in self._sources},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`; changed weights apply to the shares of the whole run.

        CheckpointError if `data.shuffle` differs, because the position would mean nothing.
        """
        shuffle = self.context.data.shuffle
        if state["shuffle"] != shuffle:
            raise other_run(f"data.shuffle was {state['shuffle']}, now it is {shuffle}")
        for source in self._sources:
            issued = state["issued"][source.name]
            if type(issued) is not int or issued < 0:
                raise CheckpointError(f"data order: {shown(issued)} prompts were issued; needs a whole number")
            source.issued = issued

    def times_issued(self) -> Mapping[str, int]:
        """The number of times that each row was issued, from the positions."""
        return dict(row for source in self._sources for row in source.times_issued())


SEEDED = PromptOrderOffer("seeded", SeededOrder, repeats=True, uses_results=False)


class _Source:
    """One source, and the number of its prompts that were issued over all epochs."""

    def __init__(self, name: str, prompts: Sequence[Prompt], weight: float, seed: int, shuffle: bool) -> None:
        if not (weight > 0 and math.isfinite(weight)):
            raise ConfigError(f"data.sources.{name}.weight: it is {weight}; needs a number above 0")
        self.name, self.issued = name, 0
        self._prompts, self._weight, self._seed, self._shuffle = prompts, weight, seed, shuffle
        self._order: tuple[int, Sequence[int]] = (0, self._permutation(0))

    def due(self) -> tuple[float, str]:
        """The key that orders sources: the source with the least is next."""
        return (self.issued + 0.5) / self._weight, self.name

    def next_row(self) -> str:
        epoch, position = divmod(self.issued, len(self._prompts))
        if self._order[0] != epoch:
            self._order = (epoch, self._permutation(epoch))
        self.issued += 1
        return self._prompts[self._order[1][position]].id

    def times_issued(self) -> Iterator[tuple[str, int]]:
        epoch, position = divmod(self.issued, len(self._prompts))
        for place, index in enumerate(self._permutation(epoch)):
            yield self._prompts[index].id, epoch + (place < position)

    def _permutation(self, epoch: int) -> Sequence[int]:
        indices = range(len(self._prompts))
        if not self._shuffle:
            return indices
        prefix = f"{self._seed}\0{self.name}\0{epoch}\0"
        return sorted(indices, key=lambda index: hashlib.sha256(f"{prefix}{index}".encode()).digest())


def other_run(found: str) -> CheckpointError:
    """The error for a checkpoint whose data order is not this run's."""
    return CheckpointError(
        f"data order: {found}; resume with the data of the run, or begin a new run with the checkpoint's model as "
        "model.path"
    )
