"""A data source for tests, and its prompts in the core's order."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcore.config import DataConfig
from rlcore.config.sections import SourceConfig
from rlcore.contracts.prompt_orders import OrderContext, PromptOrder, RowResults
from rlcore.data import IssuedPrompts
from rlcore.data.order import SEEDED
from rlcore.plan import CORE
from rlcore.plan.run_plan import PromptOrderPlan
from rlcore.types import Prompt


def write_prompts(path: Path, num: int, text: str = "Say something, number {index}.") -> Path:
    """Write `num` distinct prompts, each with its index as the answer, to a .jsonl file; returns the path."""
    rows = [{"prompt": text.format(index=index), "answer": str(index)} for index in range(num)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def seeded_prompts(
    prompts: Mapping[str, Sequence[Prompt]], weights: Mapping[str, float], seed: int, shuffle: bool
) -> IssuedPrompts:
    """The prompts in the order of `data.order=seeded`; missing weights are 1."""
    sources = {name: SourceConfig(weight=weights.get(name, 1.0)) for name in prompts}
    return IssuedPrompts(prompts, PromptOrderPlan(SEEDED, CORE), DataConfig(sources=sources, shuffle=shuffle), seed)


class LeastSeen(PromptOrder):
    """A fake order: rows with results of the fewest groups come first, ties in turn. `calls` records its inputs."""

    def __init__(self, context: OrderContext) -> None:
        super().__init__(context)
        self._rows = [prompt.id for name in sorted(context.prompts) for prompt in context.prompts[name]]
        self._issued = 0
        self.calls: list[tuple[int, Mapping[str, RowResults]]] = []
        """Number of rows and results of each call."""

    def next(self, n: int, results: Mapping[str, RowResults]) -> Sequence[str]:
        """See `PromptOrder.next`. Rows without results have no groups."""
        self.calls.append((n, dict(results)))
        size = len(self._rows)

        def place(index: int) -> tuple[int, int]:
            row = self._rows[index]
            return results[row].groups if row in results else 0, (index - self._issued) % size

        chosen = sorted(range(size), key=place)
        self._issued += n
        return [self._rows[chosen[number % size]] for number in range(n)]

    def state(self) -> dict[str, Any]:
        """Rows issued so far."""
        return {"issued": self._issued}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a result of `state`."""
        self._issued = state["issued"]
