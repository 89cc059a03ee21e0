"""A key-value cache for rows that share prompts: it stores each prompt once, and per row only its other tokens.

Both are tables of slots without gaps. The last row takes the slot of a row that ends, so live rows are always the first
ones and only one row is copied. Tokens are at the left of their slot: index is position.

Letters: G prompts, P positions of the longest of them, R rows, L positions of the longest row's own part, T tokens of
one forward pass, h key-value heads, D size of a head.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import prod
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

MASKED = -1e30
"""The score that hides a position from attention; finite, so a row that sees nothing of its prompt does not give
NaN."""
LayerStates = tuple[Tensor, Tensor]
"""Keys and values of one layer."""
GROWTH = 64
"""Minimum number of positions by which the tables grow."""


@dataclass(frozen=True, eq=False)
class PromptPass:
    """A forward pass over prompts that fill the slots from `first` on, padded on the right."""

    first: int
    done: int = 0
    """Positions that these slots hold before this pass."""


@dataclass(frozen=True, eq=False)
class RowPass:
    """A forward pass of `tokens` tokens over the rows `first` .. `first + len(own_R)`."""

    first: int
    tokens: int
    first_prompt: int
    """The first prompt slot of these rows."""
    group_R: Tensor
    """Each row's prompt slot, counted from `first_prompt`."""
    prompt_R: Tensor
    """Tokens in each row's prompt slot."""
    own_R: Tensor
    """Further tokens that each row holds before this pass."""
    num_prompts: int
    """Prompt slots from `first_prompt` to the last of these rows."""
    longest_prompt: int
    longest_own: int
    """Positions of the rows' own parts after this pass."""
    rows_GW: Tensor
    """The rows of each prompt, as indices into this pass, padded with any row."""
    place_R: Tensor
    """Each row's index in the flattened `rows_GW`."""
    last_R: Tensor | None
    """Position of each row's last token. Padding gets the same position. None: the pass has no padding."""
    same_own: int | None
    """The value of `own_R` if it is the same for all rows; else None."""
    in_order: bool
    """True if the flattened `rows_GW` is exactly the rows in order."""
    masks_of_heads: dict[tuple[int | None, int, torch.dtype], tuple[Tensor, Tensor]] = field(default_factory=dict)
    """`masks` in the form that attention adds to scores."""
    whole_masks: dict[tuple[int | None, torch.dtype], Tensor | None] = field(default_factory=dict)
    """The same for one token per row, over all positions together; None if none is hidden."""
    _masks: dict[int | None, tuple[Tensor, Tensor]] = field(default_factory=dict)
    _written: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    @property
    def rows(self) -> slice:
        """The slots of this pass."""
        return slice(self.first, self.first + len(self.own_R))

    @cached_property
    def places_F(self) -> Tensor:
        """`rows_GW`, flat."""
        return self.rows_GW.flatten()

    def written(self, kv_heads: int, positions: int) -> Tensor:
        """(R * h * T,) index of each row's next positions in a table (slots, h, positions, D) viewed as (-1, D)."""
        if (kv_heads, positions) not in self._written:
            slot_R = torch.arange(self.rows.start, self.rows.stop, device=self.own_R.device)
            line_Rh = slot_R[:, None] * kv_heads + torch.arange(kv_heads, device=self.own_R.device)
            first_Rh = line_Rh * positions + self.own_R[:, None]
            place_T = torch.arange(self.tokens, device=self.own_R.device)
            self._written[kv_heads, positions] = (first_Rh[..., None] + place_T).flatten()
        return self._written[kv_heads, positions]

    @property
    def positions_RT(self) -> Tensor:
        """The position of each token in its whole row."""
        place_RT = (self.prompt_R + self.own_R)[:, None] + torch.arange(self.tokens, device=self.own_R.device)
        return place_RT if self.last_R is None else torch.minimum(place_RT, self.last_R[:, None])

    def masks(self, window: int | None) -> tuple[Tensor, Tensor]:
        """(R, T, P) and (R, T, L) masks over the prompt and the row's own part: 0 where a token sees a position, else
        MASKED.

        `window`: number of positions that a token sees, itself included; None: all.
        """
        if window not in self._masks:
            device = self.own_R.device
            prompt_P = torch.arange(self.longest_prompt, device=device)
            own_L = torch.arange(self.longest_own, device=device)
            query_RT1 = self.positions_RT[:, :, None]
            sees_prompt_RTP = (prompt_P < self.prompt_R[:, None])[:, None].expand(-1, self.tokens, -1)
            position_RL = self.prompt_R[:, None] + own_L
            sees_own_RTL = position_RL[:, None] <= query_RT1
            if window is not None:
                sees_prompt_RTP = sees_prompt_RTP & (prompt_P > query_RT1 - window)
                sees_own_RTL = sees_own_RTL & (position_RL[:, None] > query_RT1 - window)
            self._masks[window] = _hiding(sees_prompt_RTP), _hiding(sees_own_RTL)
        return self._masks[window]


def _hiding(sees: Tensor) -> Tensor:
    return torch.zeros(sees.shape, device=sees.device).masked_fill_(~sees, MASKED)


class SlotLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Keys and values of one layer."""

    is_sliding = False

    def __init__(self, cache: "SlotCache") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache = cache
        self.prompts: tuple[Tensor, Tensor] | None = None
        """(slots, h, positions, D) keys and values of the prompts."""
        self.rows: tuple[Tensor, Tensor] | None = None
        """(slots, h, positions, D) keys and values of the rows' own parts."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the new (rows, h, T, D) keys and values at the current pass's positions; returns those to attend to."""
        cache, new = self._cache, (key_states, value_states)
        self.is_initialized = True
        cache.current = self
        if isinstance(cache.now, PromptPass):
            self.write_prompts(new, cache.now.first, cache.now.done)
            if self.prompts is None or not cache.now.done:
                return new
            slots, positions = slice(cache.now.first, cache.now.first + len(key_states)), key_states.shape[2]
            keys, values = (table[slots, :, : cache.now.done + positions] for table in self.prompts)
            return keys, values
        current = cache.row_pass
        self.rows = _fitting(self.rows, new, cache.row_slots)
        for table, states in zip(self.rows, new, strict=True):
            if current.same_own is not None:  # also rows that are recomputed from their beginning
                table[current.rows, :, current.same_own : current.longest_own] = states
            else:
                _, kv_heads, positions, size = table.shape
                where = current.written(kv_heads, positions)
                table.view(-1, size).index_copy_(0, where, states.reshape(-1, size))
        if cache.joins:
            return self.joined(0), self.joined(1)
        return self.rows[0][current.rows, :, : current.longest_own], self.rows[1][
            current.rows, :, : current.longest_own
        ]

    def write_prompts(self, new: tuple[Tensor, Tensor], first: int, done: int = 0) -> None:
        """Write (prompts, h, positions, D) keys and values into the slots from `first` on, after `done` positions."""
        self.prompts = _fitting(self.prompts, new, self._cache.prompt_slots)
        for table, states in zip(self.prompts, new, strict=True):
            table[first : first + len(states), :, done : done + states.shape[2]] = states

    def write_row(self, states: tuple[Tensor, Tensor], row: int) -> None:
        """Write (1, h, positions, D) keys and values into the slot of a row."""
        self.rows = _fitting(self.rows, states, self._cache.row_slots)
        for table, new in zip(self.rows, states, strict=True):
            table[row : row + 1, :, : new.shape[2]] = new

    def copy_of_prompt(self, slot: int, positions: int) -> LayerStates:
        """(1, h, positions, D) keys and values of a prompt."""
        return _copy(self.prompts, slot, positions)

    def copy_of_row(self, row: int, positions: int) -> LayerStates:
        """(1, h, positions, D) keys and values of a row's own part."""
        # A row without own positions may have no slot yet.
        return _copy(self.rows, row, positions) if positions else _copy(self.prompts, 0, 0)

    def joined(self, which: int) -> Tensor:
        """(R, h, P + L, D) keys (0) or values (1) of the current rows, the prompt's first: a copy."""
        prompts, own = self.prompt_part(which), self.row_part(which)
        return torch.cat([prompts[self._cache.row_pass.group_R], own], dim=2)

    def prompt_part(self, which: int) -> Tensor:
        """(G, h, P, D) keys (0) or values (1) of the current rows' prompts."""
        if self.prompts is None:
            raise ValueError("the layer holds no prompt yet")
        current = self._cache.row_pass
        stop = current.first_prompt + current.num_prompts
        return self.prompts[which][current.first_prompt : stop, :, : current.longest_prompt]

    def row_part(self, which: int) -> Tensor:
        """(R, h, L, D) keys (0) or values (1) of the own parts of the current rows."""
        if self.rows is None:
            raise ValueError("the layer holds no row yet")
        current = self._cache.row_pass
        return self.rows[which][current.rows, :, : current.longest_own]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing; `update` creates the tables."""

    def get_seq_length(self) -> int:
        """Positions before this pass."""
        now = self._cache.now
        if isinstance(now, PromptPass):
            return now.done
        return 0 if now is None else now.longest_prompt + now.longest_own - now.tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1


class SlotCache(Cache):
    """The cache of a whole model. `now` is the current pass.

    `joins`: attention gets copies of whole rows instead of the shared parts, for models with custom attention code.
    """

    def __init__(self, *, joins: bool = False) -> None:
        super().__init__(layer_class_to_replicate=partial(SlotLayer, self))  # type: ignore[arg-type]
        self.now: PromptPass | RowPass | None = None
        self.current: SlotLayer | None = None
        """The layer that was updated last."""
        self.joins = joins
        self.prompt_slots = (0, 0)
        """Capacity: number of prompts, and of positions per prompt."""
        self.row_slots = (0, 0)

    @property
    def row_pass(self) -> RowPass:
        """The current pass over rows."""
        if not isinstance(self.now, RowPass):
            raise ValueError("no pass over rows has begun")
        return self.now

    @property
    def capacity(self) -> int:
        """Positions of all slots."""
        return prod(self.prompt_slots) + prod(self.row_slots)

    def copy_of_prompt(self, slot: int, positions: int) -> list[LayerStates]:
        """Each layer's keys and values of a prompt."""
        return [layer.copy_of_prompt(slot, positions) for layer in self.layers if isinstance(layer, SlotLayer)]

    def copy_of_row(self, row: int, positions: int) -> list[LayerStates]:
        """Each layer's keys and values of a row's own part."""
        return [layer.copy_of_row(row, positions) for layer in self.layers if isinstance(layer, SlotLayer)]

    def restore(self, prompts: Mapping[int, list[LayerStates]], rows: Mapping[int, list[LayerStates]]) -> None:
        """Move copies into the slots of prompts and rows. A layer's copies are freed before the next ones are written,
        so only one layer is there twice."""
        num_layers = max(map(len, rows.values()), default=0)
        while len(self.layers) < num_layers:
            self.layers.append(SlotLayer(self))
        for layer in reversed(self.layers[:num_layers]):
            if isinstance(layer, SlotLayer):
                layer.is_initialized = True
                for slot, layers in prompts.items():
                    layer.write_prompts(layers.pop(), slot)
                for row, layers in rows.items():
                    layer.write_row(layers.pop(), row)

    def reserve_prompts(self, num: int, positions: int, most: int, longest: int) -> None:
        """Make room, at the next update, for `num` prompts of `positions` tokens; never for more than `most` prompts,
        or for more than `longest` tokens."""
        self.prompt_slots = _grown(self.prompt_slots, num, positions, most, longest)

    def reserve_rows(self, num: int, positions: int, most: int, longest: int) -> None:
        """Make room, at the next update, for `num` rows of `positions` tokens; never for more than `most` rows, or for
        more than `longest` tokens."""
        self.row_slots = _grown(self.row_slots, num, positions, most, longest)

    def release(self) -> None:
        """Free the tables now: cache and layers refer to each other, so garbage collection might come late."""
        for layer in self.layers:
            if isinstance(layer, SlotLayer):
                layer.prompts = layer.rows = None

    def copy_beginning(self, source: int, first: int, num: int, positions: int) -> None:
        """Copy the first positions of a prompt into `num` slots from `first` on."""
        for layer in self.layers:
            if isinstance(layer, SlotLayer) and layer.prompts is not None:
                layer.prompts = _fitting(layer.prompts, layer.prompts, self.prompt_slots)
                for table in layer.prompts:
                    table[first : first + num, :, :positions] = table[source, :, :positions]

    def move_prompt(self, source: int, target: int) -> None:
        """Copy a prompt into another slot."""
        for layer in self.layers:
            if isinstance(layer, SlotLayer) and layer.prompts is not None:
                for table in layer.prompts:
                    table[target] = table[source]

    def move_row(self, source: int, target: int, positions: int) -> None:
        """Copy the first positions of a row's own part into another slot; a row without any may have no slot yet."""
        if positions < 1:
            return
        for layer in self.layers:
            if isinstance(layer, SlotLayer) and layer.rows is not None:
                for table in layer.rows:
                    table[target, :, :positions] = table[source, :, :positions]


def _grown(slots: tuple[int, int], num: int, positions: int, most: int, longest: int) -> tuple[int, int]:
    """At least the requested size; growth is by half or more, so that it is rare, up to `longest` positions."""
    if num > slots[0]:
        num = max(num, min(most, slots[0] + slots[0] // 2))
    if positions > slots[1]:
        grown = -(-max(positions, slots[1] + slots[1] // 2) // GROWTH) * GROWTH
        positions = max(positions, min(grown, longest))
    return max(num, slots[0]), max(positions, slots[1])


def _copy(tables: tuple[Tensor, Tensor] | None, slot: int, positions: int) -> LayerStates:
    if tables is None:
        raise ValueError("the layer holds nothing yet")
    keys, values = (table[slot : slot + 1, :, :positions].clone() for table in tables)
    return keys, values


def _fitting(tables: tuple[Tensor, Tensor] | None, new: tuple[Tensor, Tensor], slots: tuple[int, int]) -> Any:
    """Tables for that many slots and positions, with the contents of the old ones.

    Initialized to zeros, because unwritten positions are multiplied by a probability of 0 and must be numbers.
    """
    if tables is not None and tables[0].shape[0] >= slots[0] and tables[0].shape[2] >= slots[1]:
        return tables
    fresh = tuple(turn.new_zeros((slots[0], turn.shape[1], slots[1], turn.shape[3])) for turn in new)
    if tables is not None:
        for table, old in zip(fresh, tables, strict=True):
            table[: old.shape[0], :, : old.shape[2]] = old
    return fresh
