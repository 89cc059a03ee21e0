"""Checks over all the data, before the first request, that prompts and responses fit the model's window."""

from collections.abc import Callable

from rlcore.agents.single_turn import SingleTurn
from rlcore.config import RunConfig
from rlcore.errors import ConfigError
from rlcore.runtime.launch import Runtime
from rlcore.types import Prompt

CheckPrompt = Callable[[Prompt, int], None]
"""Given a prompt and its number of tokens."""


def window_of(run: Runtime) -> int | None:
    """Tokens of a prompt and its response together, at most.

    None if the rollout does not report it, and for an agent that fits each request into the window.
    """
    return run.context_length if isinstance(run.agent, SingleTurn) else None


def fits(window: int | None, max_tokens: int, knob: str) -> CheckPrompt:
    """A check that rejects prompts that leave less than `max_tokens` (from `knob`) of the window for a response."""

    def check(prompt: Prompt, num_tokens: int) -> None:
        if window is not None and num_tokens + max_tokens > window:
            room = window - num_tokens
            raise ConfigError(
                f"data: prompt '{prompt.id}' has {num_tokens} tokens, with {knob}={max_tokens} together "
                f"{num_tokens + max_tokens}, but the model's window holds {window}; lower "
                + (f"{knob} to {room}, or " if room > 0 else "")
                + f"data.max_prompt_tokens below {num_tokens} to leave such prompts out"
            )

    return check


def fits_evaluation(config: RunConfig, window: int | None) -> CheckPrompt:
    """The check for held-out prompts."""
    if config.eval.max_tokens:
        return fits(window, config.eval.max_tokens, "eval.max_tokens")
    return fits(window, config.rollout.max_tokens, "rollout.max_tokens")
