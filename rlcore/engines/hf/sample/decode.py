"""Forward passes over rows that share prompts: each prompt once, then one token of every row at a time.

A beginning that prompts have in common is computed once, and of a conversation's further turn only what is new.

It calls transformers' modules, so it supports any causal language model whose only state is keys and values. Its
results are compared with the model's plain forward pass before it is used.

Letters as in `kv_cache`; N prompts of one pass, H hidden size, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlcore.engines.hf.cache_name import cache_name
from rlcore.engines.hf.sample.decode_row import DecodeGroup, DecodeRow
from rlcore.engines.hf.sample.fused_decode import FusedDecode, is_known, is_watched
from rlcore.engines.hf.sample.kept_turns import KeptTurn, KeptTurns
from rlcore.engines.hf.sample.kv_cache import PromptPass, RowPass, SlotCache
from rlcore.engines.hf.sample.packed_linear import PackedLinears, can_pack
from rlcore.engines.hf.sample.prompt_passes import by_beginning, by_tokens, common_beginning, parts_of
from rlcore.engines.hf.sample.row_attention import attending
from rlcore.engines.hf.train.half_products import write_wide
from rlcore.engines.hf.train.model import PolicyModel
from rlcore.engines.hf.train.rounding import HALF

PACK_TOKENS = 16
"""The weights are packed if a row may still draw this many tokens; packing takes as long as a few of them."""
SHARED_TOKENS = 64
"""Minimum length of a beginning that prompts share."""


class Decoder:
    """Holds the live rows and their cache. The caller decides on order and admission."""

    def __init__(
        self,
        model: PolicyModel,
        max_rows: int,
        device: torch.device,
        cached_tokens: int = 0,
        most_prompt: int | None = None,
    ) -> None:
        """`cached_tokens`: finished turns are kept while they and the slots of live rows have no more tokens.

        `most_prompt`: maximum tokens of a prompt that rows share; None: no limit.
        """
        self.kept = KeptTurns(cached_tokens)
        self.rows: list[DecodeRow] = []
        """Live rows, by slot."""
        self.groups: list[DecodeGroup] = []
        """Prompts in the cache, by slot."""
        self._model = model
        self._max_rows, self._most_prompt = max_rows, most_prompt
        self._device = device
        self._hidden_RH: Tensor | None = None
        self._packed: PackedLinears | None = None
        self.siblings: list[tuple[nn.Linear, ...]] = []
        """Groups of linear layers with the same input tensor."""
        self.joins = not getattr(model.transformer, "_supports_attention_backend", False)
        """True if the model has custom attention code, which gets copies of whole rows."""
        self.shortens = is_known(model.transformer)
        """True if fused decoding replaces the model's modules for passes of one token per row."""
        self.least_shared: int | None = None
        """Minimum length of a beginning that prompts share; None: each prompt is computed whole."""
        self._few: FusedDecode | None = None
        self._is_stale = False
        self._cache = SlotCache(joins=self.joins)
        self._cache_name = cache_name(model.transformer.base_model)

    def forget(self) -> None:
        """Discard everything computed from old weights; rows keep their tokens."""
        self.drop_copies()
        self._drop_cache()

    def drop_copies(self) -> None:
        """Discard copies of old weights; keys and values stay."""
        self._packed = self._few = None
        for group in self.groups:
            group.is_current = False

    def release(self) -> None:
        """Release all memory after the last row, so later rows depend on nothing but the weights."""
        for group in self.groups:
            group.slot = group.hidden_H = None
        self.rows, self.groups, self._packed, self._few = [], [], None, None
        self._drop_cache()

    def _drop_cache(self) -> None:
        self._cache.release()
        self._cache = SlotCache(joins=self.joins)
        self._hidden_RH = None
        self._is_stale = bool(self.groups)

    @torch.no_grad()
    def advance(self) -> None:
        """Feed every live row its last token."""
        self._pack()
        if self._is_stale:
            self._is_stale = False
            self._prefill(self.groups, first=0)
            if self.rows:
                self._hidden_RH = self._own_hidden(0, [0] * len(self.rows))
        elif self.rows:
            rows = self._row_pass(0, len(self.rows), [row.num_own - 1 for row in self.rows], 1)
            last_R1 = torch.tensor([row.token_ids[-1:] for row in self.rows], device=self._device)
            self._hidden_RH = self._one_token(rows, last_R1)

    @torch.no_grad()
    def join(self, rows: Sequence[DecodeRow]) -> None:
        """Add rows and compute the hidden states that their first tokens are drawn from."""
        if not rows:
            return
        num_before, turns = len(self.rows), self._taken(rows)
        self._restore(turns)  # first, so that their copies are gone when tables grow
        fresh = dict.fromkeys(row.group for row in rows if row.group.slot is None)
        self._prefill(list(fresh), first=len(self.groups))
        parts = [] if self._hidden_RH is None else [self._hidden_RH]
        self.rows += [row for row in rows if row not in turns and row.num_own]
        if len(self.rows) > num_before:
            done = [turns[row].num_own if row in turns else 0 for row in self.rows[num_before:]]
            parts.append(self._own_hidden(num_before, done))
        begin = [row for row in rows if row not in turns and not row.num_own]
        self.rows += begin
        parts += [row.group.hidden_H[None] for row in begin if row.group.hidden_H is not None]
        self._hidden_RH = torch.cat(parts)

    def leave(self, gone: Sequence[DecodeRow]) -> None:
        """Remove rows, and prompts that no sample needs any longer; the last ones fill the gaps."""
        for row in gone:
            self._keep(row)
            row.group.rows_left -= 1
            place = self.rows.index(row)
            last = self.rows.pop()
            if last is not row:
                self.rows[place] = last
                self._cache.move_row(len(self.rows), place, last.num_own - 1)
                if self._hidden_RH is not None:
                    self._hidden_RH[place] = self._hidden_RH[len(self.rows)]
        if self._hidden_RH is not None:
            self._hidden_RH = self._hidden_RH[: len(self.rows)]
        self.drop_prompts()

    def drop_prompts(self) -> None:
        """Remove the prompts that no sample needs any longer."""
        for group in [group for group in self.groups if group.rows_left == 0]:
            place, last = group.slot, self.groups.pop()
            group.slot = group.hidden_H = None
            if last is not group and place is not None:
                self.groups[place] = last
                self._cache.move_prompt(len(self.groups), place)
                last.slot = place

    @torch.no_grad()
    def logits(self) -> Tensor:
        """(R, V) logits of every live row's next token, to be read before the next call."""
        if self._hidden_RH is None:
            raise ValueError("no row has a hidden state")
        head, is_half = self._model.head, self._hidden_RH.dtype in HALF
        packed = None if self._packed is None or not is_half else self._packed.product_of((head.linear,))
        if packed is not None:
            raw_RV = torch.empty(len(self._hidden_RH), head.linear.out_features)
            write_wide(partial(packed, self._hidden_RH), raw_RV)
        elif is_half:
            return head.logits(self._hidden_RH)
        else:
            with self._packed.used() if self._packed is not None else nullcontext():
                raw_RV = head.linear(self._hidden_RH)
        return head.cap(raw_RV if head.scale == 1.0 else raw_RV.mul_(head.scale))

    def _pack(self) -> None:
        """Pack the weights if that pays."""
        most = max((row.request.sampling.max_tokens - len(row.token_ids) for row in self.rows), default=0)
        if self._packed is None and most >= PACK_TOKENS and can_pack(self._model.head.linear.weight):
            self._packed = PackedLinears(self._model.transformer, self._max_rows, self.siblings)
            self._few = None

    def _prefill(self, groups: Sequence[DecodeGroup], first: int) -> None:
        """Compute the prompts of groups, which get the slots `first` and those after it."""
        there, least = [group for group in self.groups[:first] if group.is_current], self.least_shared
        groups, alike = (groups, []) if least is None else by_beginning(groups, there, least)
        ordered = [*groups, *(group for part in alike for group in part)]
        self._place(ordered, first)
        self._compute(groups, 0)
        for part in alike:
            self._share(there, part, least or 1)

    def _share(self, there: Sequence[DecodeGroup], groups: Sequence[DecodeGroup], least: int) -> None:
        """Compute prompts after the beginning that they share with one another, or with one that is there."""
        source, done = common_beginning(groups, there, least) or (None, 0)
        own = common_beginning(groups[1:], groups[:1], least)
        if own is not None and own[1] * (len(groups) - 1) > done * len(groups):
            self._share(there, groups[:1], least)
            groups, (source, done) = groups[1:], own
        if source is not None:
            self._cache.copy_beginning(source.slot or 0, groups[0].slot or 0, len(groups), done)
        self._compute(groups, done)

    def _compute(self, groups: Sequence[DecodeGroup], done: int) -> None:
        """Compute prompts in neighbouring slots, whose first `done` tokens are there."""
        # Attention may copy the keys and values of all positions, so those that are there count, too.
        for some in by_tokens([len(group.token_ids) for group in groups]):
            parts = [torch.tensor(group.token_ids[done:]) for group in groups[some]]
            token_ids_NT = nn.utils.rnn.pad_sequence(parts, batch_first=True)
            hidden_NTH = self._pass(PromptPass(groups[some.start].slot or 0, done), token_ids_NT.to(self._device))
            for index, group in enumerate(groups[some]):
                group.hidden_H = hidden_NTH[index, len(parts[index]) - 1].clone()

    def _place(self, groups: Sequence[DecodeGroup], first: int) -> None:
        """Give prompts the slots from `first` on."""
        for index, group in enumerate(groups):
            group.slot, group.is_current = first + index, True
        self.groups[first:] = groups
        longest = max((len(group.token_ids) for group in groups), default=0)
        self._cache.reserve_prompts(len(self.groups), longest, self._max_rows, self._most_prompt or longest)
        self.kept.shrink(self._cache.capacity)

    def _taken(self, rows: Sequence[DecodeRow]) -> dict[DecodeRow, KeptTurn]:
        """The finished turns that rows continue. They are no longer kept, and the rows belong to their prompts."""
        turns = {}
        for row in rows:
            turn = self.kept.taken(row.request.token_ids) if row.request.n == 1 and row.group.slot is None else None
            if turn is not None:
                row.group.rows_left -= 1
                row.group, turns[row] = turn.prompt.group, turn
                row.group.rows_left += 1
        return turns

    def _restore(self, turns: Mapping[DecodeRow, KeptTurn]) -> None:
        """Add the rows that continue finished turns, with the keys and values of these."""
        prompts = list(dict.fromkeys(turn.prompt for turn in turns.values() if turn.prompt.group.slot is None))
        self._place([prompt.group for prompt in prompts], len(self.groups))
        first = len(self.rows)
        self.rows += sorted(turns, key=lambda row: row.group.slot or 0)
        self._reserve_rows(max((row.num_own for row in turns), default=0))
        self._cache.restore(
            {prompt.group.slot or 0: prompt.last_copy() for prompt in prompts},
            {first + index: turns[row].layers for index, row in enumerate(self.rows[first:])},
        )

    def _keep(self, row: DecodeRow) -> None:
        """Keep the keys and values of a finished turn whose conversation may continue."""
        group, own, slot = row.group, row.num_own - 1, row.group.slot
        is_done = row.finish is not None and len(row.versions) == 1  # else other weights computed a part
        if not (is_done and row.request.conversation) or slot is None:
            return
        if self.kept.make_room(group, own, self._cache.capacity):
            layers = self._cache.copy_of_row(self.rows.index(row), own)
            ids = np.array([*row.request.token_ids, *row.token_ids[:-1]], dtype=np.int32)
            self.kept.keep(group, ids, layers, lambda: self._cache.copy_of_prompt(slot, len(group.token_ids)))

    def _own_hidden(self, first: int, done: Sequence[int]) -> Tensor:
        """(R, H) hidden states after the last token of the rows from `first` on.

        Computed from their prompts' slots and their first `done` own tokens; a pass computes as many tokens of each
        row, so it may compute some of these again.
        """
        hidden = []
        for some in by_tokens([row.num_own - num for row, num in zip(self.rows[first:], done, strict=True)]):
            rows = self.rows[first:][some]
            longest = max(row.num_own - num for row, num in zip(rows, done[some], strict=True))
            begin = [max(0, row.num_own - longest) for row in rows]
            parts = [torch.tensor(row.own_ids[num:]) for row, num in zip(rows, begin, strict=True)]
            token_ids_RT = nn.utils.rnn.pad_sequence(parts, batch_first=True)
            last = [len(part) - 1 for part in parts]
            found: list[Tensor] = [torch.empty(0)] * len(rows)
            for start, stop in parts_of(rows, longest, self._model.transformer.config, self._device):
                own = [num + start for num in begin]
                now = self._row_pass(first + some.start, len(rows), own, stop - start)
                hidden_RTH = self._pass(now, token_ids_RT[:, start:stop].to(self._device))
                for index, place in enumerate(last):
                    if start <= place < stop:
                        found[index] = hidden_RTH[index, place - start]
            hidden.append(torch.stack(found))
        return torch.cat(hidden)

    def _row_pass(self, first: int, num: int, own: list[int], tokens: int) -> RowPass:
        """A pass over rows that hold `own` tokens each besides their prompts."""
        rows = self.rows[first : first + num]
        slots = [row.group.slot or 0 for row in rows]
        first_prompt = min(slots)
        groups, slots = self.groups[first_prompt : max(slots) + 1], [slot - first_prompt for slot in slots]
        members: list[list[int]] = [[] for _ in groups]
        for index, slot in enumerate(slots):
            members[slot].append(index)
        width = max(map(len, members))
        places = [slot * width + members[slot].index(index) for index, slot in enumerate(slots)]
        filled = [member + [(member or [0])[0]] * (width - len(member)) for member in members]
        prompt, last = [len(row.group.token_ids) for row in rows], [row.last_position for row in rows]
        is_padded = any(sum(place) + tokens > end + 1 for *place, end in zip(prompt, own, last, strict=True))
        self._reserve_rows(max(own) + tokens)
        return RowPass(
            first=first,
            tokens=tokens,
            first_prompt=first_prompt,
            group_R=torch.tensor(slots, device=self._device),
            prompt_R=torch.tensor(prompt, device=self._device),
            own_R=torch.tensor(own, device=self._device),
            last_R=torch.tensor(last, device=self._device) if is_padded else None,
            num_prompts=len(groups),
            longest_prompt=max(len(group.token_ids) for group in groups),
            longest_own=max(own) + tokens,
            rows_GW=torch.tensor(filled, device=self._device),
            place_R=torch.tensor(places, device=self._device),
            same_own=own[0] if len(set(own)) == 1 else None,
            in_order=places == list(range(len(groups) * width)),
        )

    def _reserve_rows(self, positions: int) -> None:
        longest = max((row.most_own for row in self.rows), default=0)
        self._cache.reserve_rows(len(self.rows), positions, self._max_rows, longest)
        self.kept.shrink(self._cache.capacity)

    def _one_token(self, now: RowPass, token_ids_R1: Tensor) -> Tensor:
        """(R, H) hidden states of a pass of one token per row."""
        if not self.shortens or self._cache.joins:
            return self._pass(now, token_ids_R1)[:, 0]
        if self._few is None and is_watched(self._model.transformer):
            return self._pass(now, token_ids_R1)[:, 0]
        if self._few is None:
            self._few = FusedDecode(self._model.transformer, self._packed)
        return self._few.hidden(now, self._cache, token_ids_R1)

    def _pass(self, now: PromptPass | RowPass, token_ids_NT: Tensor) -> Tensor:
        """(N, T, H) hidden states of one forward pass."""
        transformer, cache = self._model.transformer, self._cache
        cache.now = now
        settings: dict[str, Any] = {"input_ids": token_ids_NT, self._cache_name: cache, "use_cache": True}
        if isinstance(now, RowPass):
            settings["position_ids"] = now.positions_RT
            if cache.joins:
                settings["attention_mask"] = self._whole_masks(now)
        with ExitStack() as stack:
            if self._packed is not None:
                stack.enter_context(self._packed.used())
            if isinstance(now, RowPass) and not cache.joins:
                stack.enter_context(attending(transformer.config, cache))
            hidden: Tensor = transformer.base_model(**settings).last_hidden_state
        return hidden

    def _whole_masks(self, now: RowPass) -> "Tensor | dict[str, Tensor]":
        """(R, 1, T, P + L) additive masks: one, or one for each kind of layer."""
        config = self._model.transformer.config.get_text_config()
        window = getattr(config, "sliding_window", None)
        kinds = set(getattr(config, "layer_types", None) or [])
        dtype = self._model.head.linear.weight.dtype
        masks = {
            width: torch.cat(now.masks(width), dim=-1)[:, None].to(dtype)
            for width in ({None, window} if window else {None})
        }
        if len(kinds) > 1:
            return {kind: masks[window if kind == "sliding_attention" else None] for kind in kinds}
        return masks[window if window and kinds != {"full_attention"} else None]
