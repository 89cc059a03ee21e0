"""What stands between two turns of the policy, as token ids."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlcore.errors import ConfigError

if TYPE_CHECKING:
    from rlcore.tokens import Tokens

_SAID = "rlcore0said"
"""Stands for the policy's turn in a conversation that is only there to see what the template puts behind it."""
_ASKED = {"role": "user", "content": "x"}


class Turns:
    """Tokenises tool results and the opening of the next turn, never anything that was there before.

    The chat template is asked for a short conversation with the same results, and what follows the assistant's turn in
    it is what follows here. ConfigError when the template does not keep earlier turns as they were.
    """

    def __init__(self, tokens: "Tokens", role: str) -> None:
        self._tokens, self._role = tokens, role
        self._opening = tokens.encode_prompt([_ASKED])

    def after(self, last_id: int, results: Sequence[str]) -> tuple[int, ...]:
        """The ids to put behind a turn whose last sampled id is `last_id`: its end if it has none yet, the results as
        messages, and the opening of the policy's next turn."""
        messages = [{"role": self._role, "content": result} for result in results]
        ids = self._tokens.encode_prompt([_ASKED, {"role": "assistant", "content": _SAID}, *messages])
        start = len(self._opening)
        if ids[:start] != self._opening:
            raise ConfigError(
                "agent loop 'agent_loop': the chat template writes earlier turns differently when a message follows "
                "them; needs one that appends (model.chat_template)"
            )
        said = ids[start:]
        for position, each in enumerate(said):
            if each in self._tokens.eos_ids:
                return said[position + 1 :] if last_id in self._tokens.eos_ids else said[position:]
        for position in range(len(said)):  # a template without an end-of-turn token
            if self._tokens.decode(said[:position]) == _SAID:
                return said[position:]
        raise ConfigError(
            "agent loop 'agent_loop': the chat template leaves out the assistant's turn; needs one that keeps it"
        )
