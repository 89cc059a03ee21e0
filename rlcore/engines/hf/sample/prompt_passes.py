"""Sizes of passes over prompts, their common beginnings, and several tokens of each row."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from rlcore.engines.hf.sample.decode_row import DecodeGroup, DecodeRow
from rlcore.engines.hf.sample.row_attention import can_fuse

PASS_TOKENS = 8192
"""Maximum tokens of one pass over prompts, padding included; bounds the memory of its activations."""
PASS_SCORES = 2**26
"""Maximum attention scores of a layer that an accelerator holds while it computes rows again: 0.25 GiB in float32."""
PASS_MASKS = 2**24
"""Maximum numbers of a layer's mask while rows compute several tokens each: 64 MiB in float32."""
MOST_LEFT = 2048
"""Maximum tokens of a prompt after a shared beginning. Attention needs a mask of them by all positions, which takes
little memory next to the states of a pass only while they are few."""


def by_tokens(lengths: Sequence[int]) -> Iterator[slice]:
    """Consecutive rows, as many at a time as `PASS_TOKENS` allows when padded to the longest; at least one."""
    start, longest = 0, 0
    for index, length in enumerate(lengths):
        if index > start and max(longest, length) * (index + 1 - start) > PASS_TOKENS:
            yield slice(start, index)
            start, longest = index, 0
        longest = max(longest, length)
    if lengths:
        yield slice(start, len(lengths))


def parts_of(rows: Sequence[DecodeRow], longest: int, config: Any, device: torch.device) -> Iterator[tuple[int, int]]:
    """Ranges of the `longest` tokens that each row computes: no more scores at a time than `PASS_SCORES`, or, where one
    operation has attention with log-sums, no more numbers in its masks than `PASS_MASKS`."""
    slots, config = [row.group.slot or 0 for row in rows], config.get_text_config()
    own = len(rows) * max(row.num_own for row in rows)
    # Each prompt between the first and the last has as many rows as the one that has most.
    num_padded = (max(slots) - min(slots) + 1) * max(map(slots.count, slots))
    prompts = num_padded * max(len(row.group.token_ids) for row in rows)
    heads, most = config.num_attention_heads, PASS_SCORES
    if can_fuse(device):  # a mask has the heads that share keys and values
        heads, most = -(-heads // (getattr(config, "num_key_value_heads", None) or heads)), PASS_MASKS
        if not getattr(config, "sliding_window", None):  # all tokens see the whole prompt
            prompts = 0
    size = max(1, most // (heads * (own + prompts)))
    for start in range(0, longest, size):
        yield start, min(start + size, longest)


def by_beginning(
    groups: Sequence[DecodeGroup], there: Sequence[DecodeGroup], least: int
) -> tuple[list[DecodeGroup], list[list[DecodeGroup]]]:
    """(prompts that share their first `least` tokens with no other, those that share them with one another or with one
    that is `there`)."""
    parts: dict[Sequence[int], list[DecodeGroup]] = {}
    for group in groups:
        ids = group.token_ids
        parts.setdefault(ids[:least] if len(ids) > least else (), []).append(group)
    known = {group.token_ids[:least] for group in there}
    alike = {key for key, part in parts.items() if key and (len(part) > 1 or key in known)}
    whole = [group for key, part in parts.items() if key not in alike for group in part]
    return whole, [parts[key] for key in parts if key in alike]


def common_beginning(
    groups: Sequence[DecodeGroup], sources: Sequence[DecodeGroup], least: int
) -> tuple[DecodeGroup, int] | None:
    """The prompt of `sources` that has the longest beginning in common with all of `groups`, and its length in tokens.

    At least one token of each group is left to compute. None if no beginning has `least` tokens, or if more than
    `MOST_LEFT` are left of a group.
    """
    most = min((len(group.token_ids) for group in groups), default=0) - 1
    if most < least or not sources:
        return None
    common = groups[0].token_ids[:most]
    for group in groups[1:]:
        common = common[: _num_equal(common, group.token_ids)]
    found = [(source, _num_equal(common, source.token_ids)) for source in sources]
    best = max(found, key=lambda pair: pair[1])
    most_left = max(len(group.token_ids) for group in groups) - best[1]
    return best if best[1] >= least and most_left <= MOST_LEFT else None


def _num_equal(left: Sequence[int], right: Sequence[int]) -> int:
    """Number of tokens before the first that differs."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
