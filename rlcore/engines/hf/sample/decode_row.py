"""One sample while it is decoded, and the prompt that it shares with other samples."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from rlcore.contracts.sampled_row import SampledRow
from rlcore.contracts.tokens import Tokens
from rlcore.engines.hf.sample.sampling import row_stream
from rlcore.types import GenerateRequest


@dataclass(eq=False)
class DecodeGroup:
    """Tokens with which samples begin: computed once, kept while such a sample is waiting or alive.

    They are a request's prompt or the beginning of it, such as the prompt of a conversation's first turn.
    """

    token_ids: tuple[int, ...]
    rows_left: int
    """Samples that have not ended."""
    slot: int | None = None
    """Its slot in the cache; None before it is computed."""
    is_current: bool = True
    """False once the weights that computed the slot have changed."""
    hidden_H: Tensor | None = None
    """The last hidden state of the prompt, from which samples without other tokens draw their first."""


class DecodeRow(SampledRow):
    """One sample; `call` is the number of the `generate` call that waits for it."""

    def __init__(self, request: GenerateRequest, group: DecodeGroup, sample: int, call: int, tokens: Tokens) -> None:
        super().__init__(request, sample, tokens)
        self.group, self.call = group, call
        self.stream = row_stream(request.seed, sample)
        """Gives the row's random numbers, one per token."""

    @property
    def num_own(self) -> int:
        """Tokens of the whole row that are not in its prompt's slot."""
        return len(self.request.token_ids) - len(self.group.token_ids) + len(self.token_ids)

    @property
    def own_ids(self) -> list[int]:
        """These tokens."""
        return [*self.request.token_ids[len(self.group.token_ids) :], *self.token_ids]

    @property
    def last_position(self) -> int:
        """The position of its last token."""
        return len(self.request.token_ids) + len(self.token_ids) - 1

    @property
    def most_own(self) -> int:
        """The most that `num_own` may become."""
        return len(self.request.token_ids) - len(self.group.token_ids) + self.request.sampling.max_tokens

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
            row.group = fresh.setdefault(old.slot, DecodeGroup(old.token_ids, rows_left=0))
            row.group.rows_left += 1
            old.rows_left -= 1


def rows_of(request: GenerateRequest, call: int, tokens: Tokens, most_prompt: int | None = None) -> list[DecodeRow]:
    """The samples of a request, with nothing sampled yet.

    They share its prompt; a prompt of one sample is cut after `most_prompt` tokens, the rest belongs to the row.
    """
    shared = request.token_ids if request.n > 1 else request.token_ids[:most_prompt]
    group = DecodeGroup(shared, rows_left=request.n)
    return [DecodeRow(request, group, sample, call, tokens) for sample in range(request.n)]
