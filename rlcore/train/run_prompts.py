"""The prompts of a run: loaded, and left out or refused by their length."""

import asyncio
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from rlcore.agents.single_turn import SingleTurn
from rlcore.config import RunConfig
from rlcore.contracts.activity import current_activity
from rlcore.data import filter_long, load_prompts, refuse_overlap, training_sources
from rlcore.data.window import CheckPrompt, fits, fits_evaluation
from rlcore.errors import ConfigError
from rlcore.report.terminal import Terminal
from rlcore.runtime.launch import Runtime
from rlcore.types import Prompt

Prompts = Mapping[str, Sequence[Prompt]]
"""By source."""
Schemas = Sequence[Sequence[Mapping[str, Any]]]
"""Of tools, for each prompt."""
COUNTED_TOGETHER = 64
"""Prompts whose tokens are counted before the event loop runs again, so that a signal ends the run at once."""


class RunPrompts(NamedTuple):
    """The prompts of a run."""

    train: Prompts
    heldout: Prompts

    @property
    def together(self) -> list[Prompt]:
        """All of them, training first."""
        return [prompt for found in self for prompts in found.values() for prompt in prompts]


def load_data(config: RunConfig) -> RunPrompts:
    """Everything that the sources hold; ConfigError when a held-out question occurs in training."""
    prompts = load_prompts(training_sources(config.data), config.data, "data.sources")
    heldout = load_prompts(config.eval.sources, config.data)
    refuse_overlap(prompts, heldout)
    return RunPrompts(prompts, heldout)


async def fitting(run: Runtime, prompts: RunPrompts, terminal: Terminal) -> RunPrompts:
    """The prompts that are short enough, after checks; logs the number of the others.

    Schemas of tools that the agent shows in a prompt count as part of it.
    """
    config, window = run.plan.config, _window_of(run)
    current_activity().enter("counting the tokens of prompts")
    schemas = iter(await run.agent.tool_schemas(prompts.together))

    async def fit(found: Prompts, check: CheckPrompt) -> Prompts:
        needed = check if window is not None else None
        return {
            source: await _fitting(run, source, some, list(islice(schemas, len(some))), needed, terminal)
            for source, some in found.items()
        }

    return RunPrompts(
        await fit(prompts.train, fits(window, config.rollout.max_tokens, "rollout.max_tokens")),
        await fit(prompts.heldout, fits_evaluation(config, window)),
    )


async def _fitting(
    run: Runtime,
    source: str,
    prompts: Sequence[Prompt],
    schemas: Schemas,
    check: CheckPrompt | None,
    terminal: Terminal,
) -> Sequence[Prompt]:
    limit = run.plan.config.data.max_prompt_tokens
    kept: list[Prompt] = []
    for start in range(0, len(prompts), COUNTED_TOGETHER):
        part = slice(start, start + COUNTED_TOGETHER)
        kept += filter_long(prompts[part], run.tokens, limit, check, schemas[part])
        await asyncio.sleep(0)
    counted = " with the schemas of their tools" if any(schemas) else ""
    if not kept:
        raise ConfigError(
            f"data: every prompt of source '{source}' is longer than data.max_prompt_tokens={limit}{counted}; raise it "
            "or choose another source"
        )
    if num_long := len(prompts) - len(kept):
        long = f"{num_long} of {len(prompts)} prompts are longer than {limit} tokens{counted}"
        terminal.say(f"source '{source}': {long}: left out")
    return kept


def _window_of(run: Runtime) -> int | None:
    """Tokens of a prompt and its response together, at most.

    None if the rollout does not report it, and for an agent that fits each request into the window.
    """
    return run.context_length if isinstance(run.agent, SingleTurn) else None
