"""Checks that prompts and responses fit the model's window."""

from collections.abc import Callable

from rlcore.config import RunConfig
from rlcore.errors import ConfigError
from rlcore.types import Prompt

CheckPrompt = Callable[[Prompt, int], None]
"""Given a prompt and its number of tokens."""


def fits(window: int | None, max_tokens: int, knob: str, *, templated: bool = True) -> CheckPrompt:
    """A check that rejects prompts that leave less than `max_tokens` (from `knob`) of the window for a response.

    `templated`: the number of tokens includes the chat template; without it a response has less room than it seems.
    """

    def check(prompt: Prompt, num_tokens: int) -> None:
        if window is not None and num_tokens + max_tokens > window:
            room = window - num_tokens
            raise ConfigError(
                f"data: prompt '{prompt.id}' has {num_tokens} tokens{'' if templated else ' without the chat template'}"
                f", with {knob}={max_tokens} together {num_tokens + max_tokens}, but the model's window holds {window}"
                "; lower "
                + (f"{knob} {'to' if templated else 'below'} {room}, or " if room > 0 else "")
                + f"data.max_prompt_tokens below {num_tokens} to leave such prompts out"
            )

    return check


def fits_evaluation(config: RunConfig, window: int | None, *, templated: bool = True) -> CheckPrompt:
    """The check for held-out prompts."""
    if config.eval.max_tokens:
        return fits(window, config.eval.max_tokens, "eval.max_tokens", templated=templated)
    return fits(window, config.rollout.max_tokens, "rollout.max_tokens", templated=templated)
