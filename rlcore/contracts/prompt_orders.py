"""Orders of prompts, which choose the next training prompts. A plugin offers one with the hook `rlcore_prompt_orders`.

`data.order` names the order of a run. The run creates it from an `OrderContext`, and calls `next` whenever the schedule
issues prompts. `next` gets the results of *published* steps, never of samples in flight. The rows depend only on seed,
data and those results. So a resumed run issues the same prompts as an uninterrupted one, bit for bit without staleness.
If samples are in flight at a checkpoint, each prompt is trained on once, and unscored samples are sampled again.
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
    """The results of a row so far, over all its groups in published steps, including replaced groups.

    The reward of a sample is its weighted score. Failed samples do not count, and neither do groups in which all
    samples failed. With `schedule.on_stale=drop`, discarded groups do not count.
    """

    groups: int
    """Number of groups of the row; at least 1."""
    samples: int
    reward_sum: float
    num_solved: int
    """Samples with a reward of at least `data.solved_at`."""
    equal_groups: int
    """Groups whose rewards were all equal: group estimators learn nothing from them."""
    last_mean: float
    """Mean reward of the last group."""
    last_solved_frac: float
    """Share of the last group's samples that were solved."""
    version: int
    """Version of the weights when sampling of the last group began: the step that published them."""

    @property
    def mean_reward(self) -> float:
        """Mean reward of all samples."""
        return self.reward_sum / self.samples

    @property
    def solved_frac(self) -> float:
        """Share of all samples that were solved."""
        return self.num_solved / self.samples


@dataclass(frozen=True, eq=False)
class OrderContext:
    """The input of an order's constructor."""

    name: str
    """The name in `data.order`."""
    prompts: Mapping[str, Sequence[Prompt]]
    """The training prompts that fit (`data.max_prompt_tokens`), by source; at least one. `Prompt.id` names a row."""
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

    `next` runs on the run's event loop and blocks sampling. It should take milliseconds, and may take 30 seconds at
    most (`RLCORE_PLUGIN_LIMIT_S`). Planning imports the module.
    """

    def __init__(self, context: OrderContext) -> None:
        self.context = context

    @abstractmethod
    def next(self, n: int, results: Mapping[str, RowResults]) -> Sequence[str]:
        """The ids of the next `n` rows, which are issued in this order.

        `results` maps ids to the results of rows that have some; it is read-only. A later call may repeat a row, even
        while it is in flight; each time counts as another group. One call may return a row once, unless the offer sets
        `repeats` or `n` is greater than the number of rows. Random choices must be derived from the seed and the state.
        """

    @abstractmethod
    def state(self) -> Mapping[str, Any]:
        """The exact position, as JSON. Results are left out, because the run keeps them. Called after every step."""

    @abstractmethod
    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a result of `state`: the same calls of `next` then return the same rows."""

    # Not abstract: if an order does not know the counts, the run counts and keeps them in its checkpoints.
    def times_issued(self) -> Mapping[str, int] | None:
        """Number of times that each row was issued, if the order's state has it; None: the run counts."""
        return None


@dataclass(frozen=True)
class PromptOrderOffer:
    """An offer of an order of prompts; `data.order` names it."""

    name: str
    cls: type[PromptOrder]
    """Checked against `PromptOrder` when planning; created as `cls(context)`."""
    repeats: bool = False
    """One call of `next` may return a row more than once."""
    uses_results: bool = True
    """False: `results` is always empty, and checkpoints do not keep results."""

    def __post_init__(self) -> None:
        check_names(self, "name")
        check_subclass(self, "cls", PromptOrder)
        check_flags(self, "repeats", "uses_results")
