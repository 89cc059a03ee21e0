"""One sample while it is decoded, and the prompt that it shares with the other samples of its request."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from rlcore.contracts.sampled_row import SampledRow
from rlcore.contracts.tokens import Tokens
from rlcore.engines.hf.sample.sampling import row_stream
from rlcore.types import GenerateRequest


@dataclass(eq=False)
class DecodeGroup:
    """A request's prompt: computed once, kept while a sample of it is waiting or alive."""

    request: GenerateRequest
    rows_left: int
    """Samples that have not ended."""
    slot: int | None = None
    """Its slot in the cache; None before it is computed."""
    held: int = 0
    """Tokens of the prompt in that slot. The rest is computed with the row, as its first tokens."""
    is_current: bool = True
    """False once the weights that computed the slot have changed."""
    hidden_H: Tensor | None = None
    """The last hidden state of the prompt, from which each sample draws its first token."""


class DecodeRow(SampledRow):
    """One sample; `call` is the number of the `generate` call that waits for it."""

    def __init__(self, group: DecodeGroup, sample: int, call: int, tokens: Tokens) -> None:
        super().__init__(group.request, sample, tokens)
        self.group, self.call = group, call
        self.stream = row_stream(group.request.seed, sample)
        """Gives the row's random numbers, one per token."""

    @property
    def num_own(self) -> int:
        """Tokens of the whole row that are not in its prompt's slot."""
        return len(self.request.token_ids) - self.group.held + len(self.token_ids)

    @property
    def own_ids(self) -> list[int]:
        """These tokens."""
        return [*self.request.token_ids[self.group.held :], *self.token_ids]

    @property
    def order(self) -> tuple[str, int, int]:
        """Its place in the canonical order."""
        return self.request.id, self.sample, self.call


def renew_groups(waiting: Sequence[DecodeRow]) -> None:
    """Give rows without a token a new prompt if theirs was computed; they share it as before."""
    fresh: dict[int, DecodeGroup] = {}
    for row in waiting:
        old = row.group
        if old.slot is not None:
            row.group = fresh.setdefault(old.slot, DecodeGroup(row.request, rows_left=0))
            row.group.rows_left += 1
            old.rows_left -= 1


def rows_of(request: GenerateRequest, call: int, tokens: Tokens) -> list[DecodeRow]:
    """The samples of a request, with nothing sampled yet."""
    group = DecodeGroup(request, rows_left=request.n)
    return [DecodeRow(group, sample, call, tokens) for sample in range(request.n)]
