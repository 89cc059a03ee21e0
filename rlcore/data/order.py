"""The order in which training prompts are issued: seeded, mixed by weight, and known from a few numbers.

*Mixing.* The next prompt comes from the source that is furthest behind its share: the one whose (issued + 1/2) / weight
is least, ties by name (Webster's method). Shares hold at every moment, not only on average, and nothing is random.

*Within a source.* Each epoch is a new permutation: prompts sorted by a hash of (seed, source, epoch, index). It
depends on nothing else, so the position is one number a source, and no library's random generator can change it.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rlcore.data.conversation import question_of
from rlcore.errors import CheckpointError, ConfigError, shown
from rlcore.types import Prompt


class PromptOrder:
    """Issues prompts without end."""

    def __init__(
        self, prompts: Mapping[str, Sequence[Prompt]], weights: Mapping[str, float], seed: int, shuffle: bool
    ) -> None:
        """ConfigError when there are no prompts, a source is empty, or a weight is not above 0."""
        if not prompts:
            raise ConfigError("data.sources: there is none, needed is at least one source of prompts")
        self._seed, self._shuffle = seed, shuffle
        self._by_id: dict[str, Prompt] | None = None
        self._sources = [
            _Source(name, prompts[name], weights.get(name, 1.0), seed, shuffle) for name in sorted(prompts)
        ]
        self.num_prompts = sum(len(source.prompts) for source in self._sources)
        """Of all sources together."""

    def next_prompts(self, n: int) -> list[tuple[Prompt, int]]:
        """The next `n` prompts, each with its epoch: how often it had been issued before."""
        return [min(self._sources, key=_Source.due).next_prompt() for _ in range(n)]

    def prompt(self, name: str) -> Prompt:
        """The prompt of that id; CheckpointError when no source has it."""
        if self._by_id is None:
            self._by_id = {prompt.id: prompt for source in self._sources for prompt in source.prompts}
        if name not in self._by_id:
            raise _other_run(f"there is no prompt '{name}'")
        return self._by_id[name]

    def state(self) -> dict[str, Any]:
        """The exact position, as JSON."""
        return {
            "seed": self._seed,
            "shuffle": self._shuffle,
            "sources": {source.name: {"issued": source.issued, "digest": source.digest} for source in self._sources},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken; changed weights hold for the shares of the whole run.

        CheckpointError when the prompts, the seed or `data.shuffle` are others: the position would mean nothing.
        """
        saved = state["sources"]
        now = {source.name: source for source in self._sources}
        for name in sorted(saved.keys() | now.keys()):
            if name not in now or name not in saved:
                which = "new" if name not in saved else "missing"
                raise _other_run(f"source '{name}' is {which}")
            if saved[name]["digest"] != now[name].digest:
                raise _other_run(f"the prompts of source '{name}' are not those that it was saved with")
        for key, value in (("train.seed", "seed"), ("data.shuffle", "shuffle")):
            if state[value] != self.state()[value]:
                raise _other_run(f"{key} was {state[value]}, now it is {self.state()[value]}")
        for name, entry in now.items():
            issued = saved[name]["issued"]
            if type(issued) is not int or issued < 0:
                raise CheckpointError(f"data order: {shown(issued)} prompts were issued; needs a whole number")
            entry.issued = issued


class _Source:
    """One source and how many of its prompts were issued, over all epochs."""

    def __init__(self, name: str, prompts: Sequence[Prompt], weight: float, seed: int, shuffle: bool) -> None:
        if not prompts:
            raise ConfigError(f"data.sources.{name}: no prompt is left; see data.max_prompt_tokens")
        if not (weight > 0 and math.isfinite(weight)):
            raise ConfigError(f"data.sources.{name}.weight: it is {weight}, needed is a number above 0")
        self.name, self.prompts, self.issued = name, prompts, 0
        self._weight, self._seed, self._shuffle = weight, seed, shuffle
        self._order: tuple[int, Sequence[int]] = (0, self._permutation(0))
        digest = hashlib.sha256()
        for prompt in prompts:
            digest.update(f"{prompt.id}\0{question_of(prompt.messages)}\0".encode("utf-8", "surrogatepass"))
        self.digest = digest.hexdigest()

    def due(self) -> tuple[float, str]:
        """The least is next."""
        return (self.issued + 0.5) / self._weight, self.name

    def next_prompt(self) -> tuple[Prompt, int]:
        epoch, position = divmod(self.issued, len(self.prompts))
        if self._order[0] != epoch:
            self._order = (epoch, self._permutation(epoch))
        self.issued += 1
        return self.prompts[self._order[1][position]], epoch

    def _permutation(self, epoch: int) -> Sequence[int]:
        indices = range(len(self.prompts))
        if not self._shuffle:
            return indices
        prefix = f"{self._seed}\0{self.name}\0{epoch}\0"
        return sorted(indices, key=lambda index: hashlib.sha256(f"{prefix}{index}".encode()).digest())


def _other_run(found: str) -> CheckpointError:
    return CheckpointError(
        f"data order: {found}; resume with the data of the run, or begin a new run with the checkpoint's model as "
        "model.path"
    )
