"""Orders of prompts: which training prompts come next. A plugin offers one by the hook `rlcore_prompt_orders`.

`data.order` names the order of a run. It is made from an `OrderContext` and asked for rows by `next`, whenever the
schedule issues prompts. What it is told of past rows are the results of *published* steps, never of samples in flight.
The rows depend on seed, data and those results alone, so a resumed run issues what an uninterrupted one does, bit for
bit without staleness. Where samples are in flight at a checkpoint, each prompt is trained on once, and samples that
were not scored yet are drawn again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from rlcore.config import DataConfig
from rlcore.contracts.plugin_settings import settings_as
from rlcore.errors.checks.data import check_flags, check_names, check_subclass
from rlcore.types import Prompt

S = TypeVar("S")


@dataclass(frozen=True)
class RowResults:
    """The results of a row so far: of its groups that published steps used up, replaced ones included.

    The reward of a sample is its weighted score. Failed samples do not count, nor do groups without any other. With
    `schedule.on_stale=drop` groups that were given up are missing.
    """

    groups: int
    """Times that the row was seen; at least 1."""
    samples: int
    reward_sum: float
    num_solved: int
    """Samples with a reward of at least `data.solved_at`."""
    equal_groups: int
    """Groups whose rewards were all equal: group estimators learn nothing of them."""
    last_mean: float
    """Mean reward of the last group."""
    last_solved_frac: float
    """Share of the last group's samples that solved it."""
    version: int
    """Of the weights when the last group began to be sampled; the step that published them."""

    @property
    def mean_reward(self) -> float:
        """Over all samples."""
        return self.reward_sum / self.samples

    @property
    def solved_frac(self) -> float:
        """Share of all samples that solved it."""
        return self.num_solved / self.samples


@dataclass(frozen=True, eq=False)
class OrderContext:
    """Everything that an order is told when it is made."""

    name: str
    """The name in `data.order`."""
    prompts: Mapping[str, Sequence[Prompt]]
    """The training prompts that fit, by source; at least one. `Prompt.id` names a row."""
    data: DataConfig
    """The section `data`: weights of the sources, and `shuffle`."""
    seed: int
    """`train.seed`."""
    section: object = None
    """The settings section of the plugin that offers the order, or None; `settings` reads it as its class."""

    def settings(self, cls: type[S]) -> S:
        """The plugin's settings section; PluginError where it is not a `cls`."""
        return settings_as(f"prompt order {self.name}", self.section, cls)


class PromptOrder(ABC):
    """Chooses the next training prompts.

    It is called between the tasks of the run's event loop, so `next` holds up sampling: it may take 30 seconds at most
    (`RLCORE_PLUGIN_LIMIT_S`), and should take milliseconds. The module is imported when planning.
    """

    def __init__(self, context: OrderContext) -> None:
        self.context = context

    @abstractmethod
    def next(self, n: int, results: Mapping[str, RowResults]) -> Sequence[str]:
        """The ids of the next `n` rows, which are issued in this order.

        `results` has the rows with results, by id; it is read-only, and never changes. A row may come again in
        any later call, also while it is in flight: each time counts as another group. Within one call it may come once,
        unless the offer `repeats` or `n` is greater than the number of rows. Whatever is random here must be drawn from
        the seed and the state.
        """

    @abstractmethod
    def state(self) -> Mapping[str, Any]:
        """The exact position, as JSON. Called after every step; results need not be in it, the run keeps them."""

    @abstractmethod
    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken: the same calls of `next` then return the same rows."""

    # Not abstract: the run counts, and its checkpoints keep the counts, where an order does not know them.
    def times_issued(self) -> Mapping[str, int] | None:
        """Times that each row was issued, for an order whose state tells; None: the run counts."""
        return None


@dataclass(frozen=True)
class PromptOrderOffer:
    """An offer of an order of prompts; `data.order` names it."""

    name: str
    cls: type[PromptOrder]
    """Held against `PromptOrder` when planning; made as `cls(context)`."""
    repeats: bool = False
    """A row may come more than once within one call of `next`."""
    uses_results: bool = True
    """False: `results` is always empty, and checkpoints do not keep results."""

    def __post_init__(self) -> None:
        check_names(self, "name")
        check_subclass(self, "cls", PromptOrder)
        check_flags(self, "repeats", "uses_results")
