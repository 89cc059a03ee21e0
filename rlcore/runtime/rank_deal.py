"""Decides which rank of a replica samples each request."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from zlib import crc32

from rlcore.contracts.dispatch import REMEMBERED_HOMES
from rlcore.types import GenerateRequest


class RankDeal:
    """Deals requests to ranks in turn, and all of one conversation to the rank whose cache holds its earlier turns."""

    def __init__(self) -> None:
        self._ranks: OrderedDict[str, int] = OrderedDict()
        """The ranks of conversations, those used last at the end."""

    def deal(self, requests: Sequence[GenerateRequest]) -> list[GenerateRequest]:
        """The requests of one call, in canonical order, with their ranks.

        The first rank depends on the first id only, so ranks do not depend on the order of calls, and calls of a single
        request use all ranks. Conversations take turns, however many requests each has.
        """
        after = crc32(requests[0].id.encode()) if requests else 0
        dealt = []
        for request in requests:
            rank = self._ranks.get(request.conversation, after)
            after += request.conversation not in self._ranks
            if request.conversation:
                self._remember(request.conversation, rank)
            dealt.append(replace(request, rank=rank))
        return dealt

    def _remember(self, conversation: str, rank: int) -> None:
        self._ranks[conversation] = rank
        self._ranks.move_to_end(conversation)
        if len(self._ranks) > REMEMBERED_HOMES:
            self._ranks.popitem(last=False)
