"""Collects notes of a TRL-style function besides its scores: `log_extra` and `log_metric`."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rlcore.contracts.scorer import Outcome, as_plain, exact_text, extra_value_problem, number
from rlcore.errors import RewardError


class CallNotes:
    """The notes of one call. Invalid notes fail the call."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples
        self._extra: dict[str, list[Any]] = {}
        self._metrics: defaultdict[str, list[float]] = defaultdict(list)

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """A value for each sample of the call, for its `info`."""
        if isinstance(values, str) or len(values) != self._num_samples:
            found = f"{len(values)} values" if not isinstance(values, str) else "a text"
            raise RewardError(
                f"log_extra('{column}', ...): {found} for {self._num_samples} samples; needs a list of as many"
            )
        for value in values:
            if (wrong := extra_value_problem(value)) is not None:
                raise RewardError(f"log_extra('{column}', ...): found {wrong}")
        self._extra[exact_text(column)] = [as_plain(value) for value in values]

    def log_metric(self, name: str, value: Any) -> None:
        """A number of this call, which becomes a metric: its mean over the samples."""
        checked = number(value)
        if isinstance(checked, str):
            raise RewardError(f"log_metric('{name}', ...): {checked.replace('returned', 'found', 1)}")
        self._metrics[exact_text(name)].append(checked)

    def on(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """The outcomes with their notes."""
        if not self._extra and not self._metrics:
            return list(outcomes)
        means = {name: sum(metric) / len(metric) for name, metric in self._metrics.items()}
        return [
            replace(
                outcome,
                components={**outcome.components, **means},
                info={**outcome.info, **{column: values[index] for column, values in self._extra.items()}},
            )
            for index, outcome in enumerate(outcomes)
        ]
