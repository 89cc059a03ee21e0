"""Checks all the data, before the first request, for prompts that cannot be served."""

from collections.abc import Mapping, Sequence
from typing import Any

from rlcore.contracts.tokens import PromptBound
from rlcore.errors import ConfigError, nearest
from rlcore.types import Prompt
from rlcore_agent_loop.conversation.conversation import ConversationContext
from rlcore_agent_loop.settings import AgentLoopSettings


def check_column(settings: AgentLoopSettings, prompts: Sequence[Prompt]) -> None:
    """ConfigError when no prompt has the column that lists its tools: every prompt would get all of them."""
    column = settings.tools_column
    if column and prompts and not any(column in prompt.columns for prompt in prompts):
        columns = sorted({name for prompt in prompts for name in prompt.columns})
        raise ConfigError(
            f"plugins.agent_loop.tools_column: no row has a column '{column}'; {nearest(column, columns)}"
        )


class PromptBudget:
    """Finds prompts that fill the context, together with their tools' schemas."""

    def __init__(self, kit: ConversationContext) -> None:
        self._kit = kit
        self._bound = PromptBound(kit.tokens)

    def check(self, prompt: Prompt, schemas: Sequence[Mapping[str, Any]]) -> None:
        """ConfigError naming the prompt and the numbers. Most prompts are too short to need tokenising."""
        if self._kit.context is not None and self._bound.of(prompt.messages, schemas) >= self._kit.context:
            self._kit.budget(len(self._kit.tokens.encode_prompt(prompt.messages, schemas)), 1, prompt.id)
