"""First turns of conversations that begin together: sampled in one call, each starting its conversation."""

import asyncio
from collections.abc import Sequence

from rlcore.aio import Timers
from rlcore.types import Completion, GenerateRequest
from rlcore_agent_loop.conversation.conversation import Conversation
from rlcore_agent_loop.conversation.turn_sampler import TurnSampler
from rlcore_agent_loop.workers.open_conversations import OpenConversations, Sample


class FirstTurns:
    """Conversations that wait for their first turn."""

    def __init__(self, conversations: OpenConversations, timers: Timers) -> None:
        self._conversations, self._timers = conversations, timers
        self.waiting: dict[Sample, Conversation] = {}

    async def sample(self, turns: TurnSampler, requests: Sequence[GenerateRequest], due: float) -> None:
        """Request the first turns and begin each conversation with its turn. Those without one at `due` end.

        A turn whose caller has left is sampled too: the draws of a sample depend on its place in the group.
        """
        self._timers.set(self, due, self._time_is_up)
        try:
            await turns.sample_groups(requests, self._begin)
        finally:
            # after the conversations that have just begun, so that their own limits are handled first
            asyncio.get_running_loop().call_soon(self._timers.take_back, self)

    def _begin(self, sample: Sample, first: Completion | None) -> None:
        conversation = self.waiting.pop(sample, None)
        if conversation is not None:
            self._conversations.begin(lambda: conversation.run(first))

    def _time_is_up(self) -> None:
        for sample in list(self.waiting):
            self._begin(sample, None)
