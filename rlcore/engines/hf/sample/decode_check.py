"""Checks that `Decoder` can decode a model."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import Module

from rlcore.contracts.tokens import Tokens
from rlcore.engines.hf.sample.decode import PACK_TOKENS, SHARED_TOKENS, Decoder
from rlcore.engines.hf.sample.decode_row import DecodeRow, rows_of
from rlcore.engines.hf.sample.kept_turns import KeptTurns
from rlcore.engines.hf.sample.packed_linear import siblings_of, watching
from rlcore.engines.hf.sample.row_attention import UnsupportedAttention
from rlcore.engines.hf.train.model import PolicyModel
from rlcore.engines.hf.train.rounding import HALF
from rlcore.engines.hf.train.trial_noise import difference_and_bound
from rlcore.errors import ConfigError, boundary
from rlcore.types import FinishReason, GenerateRequest, Sampling

TRIAL_TOKENS = 1000
"""More than a trial's turns and rows have."""


def check_decoding(model: PolicyModel, decoder: Decoder, tokens: Tokens) -> None:
    """Choose the model's attention, and find its layers that share an input tensor.

    ConfigError if decoding and the plain forward pass give different logits. NaN weights pass; sampling reports them.
    """
    name = type(model.transformer).__name__
    kinds = set(getattr(model.transformer.config.get_text_config(), "layer_types", None) or [])
    if kinds - {"full_attention", "sliding_attention"} or getattr(model.transformer, "_is_stateful", False):
        raise ConfigError(
            f"rollout.backend=hf: {name} has layers other than attention ({', '.join(sorted(kinds)) or 'recurrent'}), "
            "which the embedded rollout cannot decode; choose a model with attention layers only, or another rollout "
            "backend"
        )
    if _adds_alibi(model.transformer.base_model):
        raise ConfigError(
            f"rollout.backend=hf: {name} adds ALiBi biases to its attention, which the embedded rollout "
            "cannot decode; choose another model or another rollout backend"
        )
    difference = 0.0
    if decoder.shortens and not decoder.joins:
        with suppress(ConfigError), boundary(f"rollout.backend=hf: short decoding with {name}", ConfigError):
            if not float(_trial(model, decoder, tokens)[0].max()) > _allowed_of_short(model, decoder, tokens):
                return
        decoder.shortens = False  # the model's own modules may still work
    for joins in (False, True) if not decoder.joins else (True,):
        decoder.joins = joins
        try:
            with boundary(f"rollout.backend=hf: decoding with {name}", ConfigError):
                difference, bound = _difference_and_bound(model, decoder, tokens)
        except ConfigError as error:
            if not joins and isinstance(error.__cause__, UnsupportedAttention):
                continue
            raise
        if not difference > bound:
            return
    raise ConfigError(
        f"rollout.backend=hf: tokens that {name} decodes one at a time have logits that differ by {difference:.3g} of "
        "their size from those of its forward pass; choose another model or another rollout backend"
    )


def _adds_alibi(base: Module) -> bool:
    """True if the biases come from a mask of whole rows (Bloom, Falcon); Mpt's come from the length of its cache."""
    return hasattr(base, "build_alibi_tensor") or bool(getattr(base, "use_alibi", False))


def rotates_by_length(model: PolicyModel) -> bool:
    """True if rotary factors depend on the longest position of a pass (NTK and LongRoPE), so that keys of a shorter
    pass do not fit a longer one."""
    parameters = getattr(model.transformer.config.get_text_config(), "rope_parameters", None) or {}
    kinds = [parameters, *parameters.values()]
    return any(isinstance(kind, Mapping) and kind.get("rope_type") in ("dynamic", "longrope") for kind in kinds)


def check_shared_beginnings(model: PolicyModel, decoder: Decoder, tokens: Tokens) -> None:
    """Let prompts share beginnings only if they have the logits of the plain forward pass then."""
    vocabulary, name = len(model.head.linear.weight), type(model.transformer).__name__
    ids = [index * 7919 % vocabulary for index in range(12)]
    prompts = (ids[:8], [*ids[:5], *ids[9:]], ids[:6])
    rows = [
        row
        for index, prompt in enumerate(prompts)
        for row in rows_of(GenerateRequest(f"probe/{index}", tuple(prompt), Sampling(max_tokens=1), 1, 0), 0, tokens)
    ]
    found, decoder.least_shared = None, 2
    try:
        with suppress(ConfigError), boundary(f"rollout.backend=hf: prompts of {name}", ConfigError):
            decoder.join(rows[:2])
            decoder.join(rows[2:])
            found = SHARED_TOKENS if _are_plain(model, decoder) else None
    finally:
        decoder.release()
        decoder.least_shared = found


def check_kept_turns(model: PolicyModel, decoder: Decoder, tokens: Tokens) -> None:
    """Keep finished turns only if the next ones have the logits of the plain forward pass then."""
    vocabulary, name = len(model.head.linear.weight), type(model.transformer).__name__
    ids = tuple(index * 7919 % vocabulary for index in range(12))
    first = GenerateRequest("probe", ids[:8], Sampling(max_tokens=4), 2, 0, conversation="probe")
    planned, decoder.kept = decoder.kept, KeptTurns(TRIAL_TOKENS)
    try:
        with suppress(ConfigError), boundary(f"rollout.backend=hf: further turns of {name}", ConfigError):
            rows = rows_of(first, 0, tokens)
            decoder.join(rows)
            for row, num in zip(list(rows), (1, 3), strict=True):  # of unequal lengths
                while len(row.token_ids) < num:
                    if row.token_ids:
                        decoder.advance()
                    for live in decoder.rows:
                        live.token_ids.append(ids[8 + len(live.token_ids)])
                row.versions, row.finish = [(0, 0)], FinishReason.LENGTH
                decoder.leave([row])
            texts = (ids[:9] + ids[:2], ids[:11] + ids[:3])
            later = [replace(first, token_ids=text, n=1) for text in texts]
            rows = [row for request in later for row in rows_of(request, 0, tokens)]
            decoder.join(rows)
            if _are_plain(model, decoder):
                return
        planned = KeptTurns(0)
    finally:
        decoder.release()
        decoder.kept = planned


def _are_plain(model: PolicyModel, decoder: Decoder) -> bool:
    """True if the logits of the live rows are those of the plain forward pass."""
    expected_R1V = _expected(model, decoder.rows)[:, 1:]

    def noise() -> Tensor:
        return _differences(expected_R1V, _expected(model, decoder.rows)[:, 1:])

    difference_R = _differences(expected_R1V, decoder.logits()[:, None])
    difference, bound = difference_and_bound(model.transformer, difference_R, _allowed(model), noise)
    return not difference > bound


def _allowed(model: PolicyModel) -> float:
    return 0.1 if model.head.linear.weight.dtype in HALF else 1e-3


def _allowed_of_short(model: PolicyModel, decoder: Decoder, tokens: Tokens) -> float:
    """In half precision twice the difference of decoding with the model's modules, whose roundings are as many."""
    dtype = model.head.linear.weight.dtype
    if dtype not in HALF:
        return 1e-4 if dtype == torch.float32 else 1e-6
    decoder.shortens = False
    try:
        return 2.0 * float(_trial(model, decoder, tokens)[0].max())
    finally:
        decoder.shortens = True


def _difference_and_bound(model: PolicyModel, decoder: Decoder, tokens: Tokens) -> tuple[float, float]:
    difference_P, rows = _trial(model, decoder, tokens)
    expected_R2V = _expected(model, rows)

    def noise() -> Tensor:
        return _differences(expected_R2V, _expected(model, rows))

    return difference_and_bound(model.transformer, difference_P, _allowed(model), noise)


def _trial(model: PolicyModel, decoder: Decoder, tokens: Tokens) -> tuple[Tensor, list[DecodeRow]]:
    """(the differences of three short rows over two passes, the rows)."""
    vocabulary = len(model.head.linear.weight)
    ids = [index * 7919 % vocabulary for index in range(12)]
    probe = GenerateRequest("probe", tuple(ids[:8]), Sampling(max_tokens=2 * PACK_TOKENS), 2, 0)
    rows = [*rows_of(probe, 0, tokens), *rows_of(replace(probe, token_ids=tuple(ids[3:8]), n=1), 0, tokens)]
    try:
        with watching(model.transformer) as calls:
            decoder.join(rows)
        decoder.siblings = siblings_of(calls)
        for index, row in enumerate(rows):
            row.token_ids = ids[8 + index : 10 + index]
        decoder.forget()
        decoder.advance()  # computes all tokens again
        first_RV = decoder.logits().clone()
        for row in rows:
            row.token_ids.append(ids[11])
        decoder.advance()  # one more of each
        return _differences(_expected(model, rows), torch.stack((first_RV, decoder.logits()), 1)), rows
    finally:
        decoder.release()


@torch.no_grad()
def _expected(model: PolicyModel, rows: list[DecodeRow]) -> Tensor:
    """(R, 2, V) logits at the last two positions of each row, from one forward pass of the row."""
    found = []
    for row in rows:
        whole_1T = torch.tensor([[*row.request.token_ids, *row.token_ids]], device=model.head.linear.weight.device)
        hidden_2H = model.transformer.base_model(input_ids=whole_1T, use_cache=False).last_hidden_state[0, -2:]
        found.append(model.head.logits(hidden_2H))
    return torch.stack(found)


def _differences(expected_R2V: Tensor, logits_R2V: Tensor) -> Tensor:
    """(R * 2,) largest difference of a logit, relative to the largest logit of its position."""
    size_R2 = expected_R2V.abs().amax(-1).clamp_min(1e-3)
    return ((logits_R2V - expected_R2V).abs().amax(-1) / size_R2).flatten()
