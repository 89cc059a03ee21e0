"""The prompts of a run: loaded, and left out or refused by their length."""

from collections.abc import Mapping, Sequence

from rlcore.agents.single_turn import SingleTurn
from rlcore.config import RunConfig
from rlcore.contracts.tokens import Tokens
from rlcore.data import filter_long, load_prompts, refuse_overlap, training_sources
from rlcore.data.window import CheckPrompt
from rlcore.errors import ConfigError
from rlcore.report.terminal import Terminal
from rlcore.runtime.launch import Runtime
from rlcore.types import Prompt

Prompts = Mapping[str, Sequence[Prompt]]


def load_data(config: RunConfig) -> tuple[dict[str, list[Prompt]], dict[str, list[Prompt]]]:
    """Training and held-out prompts by source; ConfigError when a held-out question occurs in training."""
    prompts = load_prompts(training_sources(config.data), config.data, "data.sources")
    heldout = load_prompts(config.eval.sources, config.data)
    refuse_overlap(prompts, heldout)
    return prompts, heldout


def window_of(run: Runtime) -> int | None:
    """Tokens of a prompt and its response together, at most.

    None if the rollout does not report it, and for an agent that fits each request into the window.
    """
    return run.context_length if isinstance(run.agent, SingleTurn) else None


def fitting(
    prompts: Prompts, tokens: Tokens, config: RunConfig, check: CheckPrompt, terminal: Terminal
) -> dict[str, list[Prompt]]:
    """The prompts that are short enough, by source, after checks; logs the number of the others."""
    fit: dict[str, list[Prompt]] = {}
    for source, prompt in prompts.items():
        fit[source], num_long = filter_long(prompt, tokens, config.data.max_prompt_tokens, check)
        if num_long:
            limit = config.data.max_prompt_tokens
            terminal.say(
                f"source '{source}': {num_long} of {len(prompt)} prompts are longer than {limit} tokens: left out"
            )
        if not fit[source]:
            raise ConfigError(
                f"data: every prompt of source '{source}' is longer than data.max_prompt_tokens="
                f"{config.data.max_prompt_tokens}; raise it or choose another source"
            )
    return fit
