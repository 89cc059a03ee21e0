"""Log-probs and entropy of tokens from hidden states, without materializing the logits of a whole batch.

Letters: N selected positions, H hidden size, V vocabulary.

Supported heads: a plain `nn.Linear` (tied or not, with or without bias), whose output is multiplied by a constant
(Granite, Cohere, Falcon-H1) and passed through a tanh soft cap (Gemma 2). `check_head` compares with the model's own
logits and rejects every other head.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rlcore.engines.hf.train.gradients import add_product
from rlcore.engines.hf.train.half_products import multiplies_half, write_wide
from rlcore.errors import ConfigError
from rlcore.plan.activations import device_logit_rows

CHUNK_ELEMENTS = 2**24
"""Logits that a CPU computes at a time: 64 MiB in float32."""
BLOCK_ELEMENTS = 2**19
"""Logits that a CPU processes at a time, 2 MiB in float32: few enough to stay in its cache between two passes."""
LAYER_ROWS = 1024
"""Rows of the output layer that a CPU multiplies at a time: product and logits then stay in its cache, 20 % faster."""
KEPT_ELEMENTS = 2**25
"""Logits that are kept for the backward pass, 128 MiB in float32; those of further chunks are computed again."""


@dataclass(frozen=True)
class Head:
    """The output layer, from the last hidden state to the logits: softcap(scale * linear(hidden))."""

    linear: nn.Linear
    scale: float = 1.0
    softcap: float = 0.0
    """0: none."""

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """(N, V) logits in float32, or float64 for a float64 model."""
        return self.cap(self.raw_logits(hidden_NH, self.linear.weight, self.linear.bias))

    def raw_logits(self, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None) -> Tensor:
        """(N, V) scaled logits before the soft cap, in at least float32; without gradients.

        Products of half precision are summed and kept in float32: a bfloat16 logit of 20 has neighbours 1/8 away.
        """
        if weight_VH.dtype == torch.float64 or hidden_NH.dtype == torch.float64:
            raw_NV = nn.functional.linear(hidden_NH, weight_VH)
        elif weight_VH.device.type == "cpu":
            raw_NV = torch.empty(len(hidden_NH), len(weight_VH))
            in_halves = multiplies_half(weight_VH)
            inputs_NH = hidden_NH if in_halves else hidden_NH.float()
            for rows in _chunks(len(weight_VH), LAYER_ROWS):
                if in_halves:
                    write_wide(partial(_product, inputs_NH, weight_VH[rows]), raw_NV[:, rows])
                else:
                    torch.mm(inputs_NH, weight_VH[rows].float().T, out=raw_NV[:, rows])
        elif weight_VH.dtype == torch.float32:
            raw_NV = nn.functional.linear(hidden_NH, weight_VH)
        else:
            raw_NV = torch.mm(hidden_NH, weight_VH.T, out_dtype=torch.float32)
        if bias_V is not None:
            raw_NV += bias_V
        return raw_NV if self.scale == 1.0 else raw_NV.mul_(self.scale)

    def cap(self, raw_NV: Tensor) -> Tensor:
        """The soft-capped tensor; unchanged if the model has no soft cap."""
        return raw_NV if self.softcap == 0.0 else self.softcap * torch.tanh(raw_NV / self.softcap)


def _product(hidden_NH: Tensor, weight_VH: Tensor, added_NV: Tensor | None) -> Tensor:
    """(N, V) product, plus a summand."""
    return hidden_NH @ weight_VH.T if added_NV is None else torch.addmm(added_NV, hidden_NH, weight_VH.T)


def at_least_float32(tensor: Tensor) -> Tensor:
    """Half precision as float32, everything else unchanged."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def find_head(model: Any) -> Head:
    """The head of a transformers causal language model; ConfigError when it is not a plain linear layer."""
    linear = model.get_output_embeddings()
    if type(linear) is not nn.Linear:
        raise ConfigError(
            f"model {type(model).__name__}: its output layer is a {type(linear).__name__}; needs a plain Linear; "
            "choose another architecture, or leave the output layer out of actor.lora.target_modules"
        )
    config = model.config.get_text_config()
    scale = float(getattr(config, "logit_scale", None) or 1.0)
    scale *= float(getattr(config, "lm_head_multiplier", None) or 1.0)
    scale /= float(getattr(config, "logits_scaling", None) or 1.0)
    return Head(linear, scale, float(getattr(config, "final_logit_softcapping", None) or 0.0))


@torch.no_grad()
def check_head(model: Any, head: Head) -> None:
    """ConfigError unless `head` on the backbone's output gives the model's own logits, on eight tokens."""
    device = head.linear.weight.device
    vocabulary = head.linear.weight.shape[0]
    probe_BT = (torch.arange(8, device=device) * 7919 % vocabulary)[None]
    theirs_TV = at_least_float32(model(input_ids=probe_BT, use_cache=False).logits[0])
    hidden_TH = model.base_model(input_ids=probe_BT, use_cache=False).last_hidden_state[0]
    difference = (head.logits(hidden_TH) - theirs_TV).abs().max().item()
    size = theirs_TV.abs().max().item()
    allowed = 0.05 if head.linear.weight.dtype in (torch.bfloat16, torch.float16) else 1e-3
    if not difference <= allowed * max(size, 1e-3):
        raise ConfigError(
            f"model {type(model).__name__}: its logits differ by {difference:.3g} (of {size:.3g}) from "
            "softcap(scale * output_layer(hidden)), the one form of head that is supported; choose another architecture"
        )


def token_scores(
    hidden_NH: Tensor,
    targets_N: Tensor,
    head: Head,
    temperature: float,
    *,
    with_entropy: bool,
    chunk_elements: int = 0,
    holder_VH: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(N,) log-probability of each target and (N,) entropy in nats, of softmax(logits / temperature).

    `hidden_NH[i]` is the state *before* target i. Entropy is 0 unless requested. The forward pass keeps the log-sum-exp
    of each position, and up to `KEPT_ELEMENTS` logits of the first chunks; the backward pass recomputes the others
    chunk by chunk. A chunk has at most `chunk_elements` logits; 0: as in `chunk_rows`. `holder_VH`: the backward pass
    adds the gradient of the head's weight to the `grad` of this tensor (`gradients.sum_holder`).
    """
    scores: tuple[Tensor, Tensor] = _TokenScores.apply(  # type: ignore[no-untyped-call]
        hidden_NH,
        head.linear.weight,
        head.linear.bias,
        targets_N,
        head,
        temperature,
        with_entropy,
        chunk_rows(head.linear.weight.shape[0], hidden_NH.device.type, chunk_elements),
        holder_VH,
    )
    return scores


def chunk_rows(vocabulary: int, device: str, chunk_elements: int = 0) -> int:
    """Rows of logits that are computed at a time on a device of that type, unless `chunk_elements` bounds them."""
    if chunk_elements == 0 and device != "cpu":
        return device_logit_rows(vocabulary)
    return max(1, (chunk_elements or CHUNK_ELEMENTS) // vocabulary)


class _TokenScores(torch.autograd.Function):
    """`token_scores` with a gradient for the hidden states and for the head's weight and bias."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        head: Head,
        temperature: float,
        with_entropy: bool,
        chunk_rows: int,
        holder_VH: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        num = len(hidden_NH)
        dtype = at_least_float32(hidden_NH[:0]).dtype
        logprobs_N, entropy_N, log_sum_N = (torch.zeros(num, dtype=dtype, device=hidden_NH.device) for _ in range(3))
        kept: list[Tensor] = []
        for rows in _chunks(num, chunk_rows):
            raw_nV = head.raw_logits(hidden_NH[rows], weight_VH, bias_V)
            if any(ctx.needs_input_grad) and rows.stop * len(weight_VH) <= KEPT_ELEMENTS:
                kept.append(raw_nV)
            for some, block in _blocks(rows, raw_nV):
                logits_nV = _tempered(head.cap(raw_nV[block]), temperature)
                highest_n1 = logits_nV.amax(dim=-1, keepdim=True)
                masses_nV = (logits_nV - highest_n1).exp_()
                total_n = masses_nV.sum(dim=-1)
                log_sum_N[some] = total_n.log() + highest_n1[:, 0]
                logprobs_N[some] = logits_nV.gather(1, targets_N[some, None])[:, 0] - log_sum_N[some]
                if with_entropy:
                    entropy_N[some] = log_sum_N[some] - _weighted(masses_nV, logits_nV) / total_n
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, targets_N, log_sum_N, entropy_N, *kept)
        ctx.head, ctx.temperature, ctx.chunk_rows, ctx.holder = head, temperature, chunk_rows, holder_VH
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, targets_N, log_sum_N, entropy_N, *kept = ctx.saved_tensors
        head: Head = ctx.head
        grad_hidden_NH = torch.zeros_like(hidden_NH) if ctx.needs_input_grad[0] else None
        sum_dtype = log_sum_N.dtype
        needs_weight = ctx.needs_input_grad[1] and ctx.holder is None
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=sum_dtype) if needs_weight else None
        needs_bias = bias_V is not None and ctx.needs_input_grad[2]
        grad_bias_V = torch.zeros_like(bias_V, dtype=sum_dtype) if needs_bias else None
        space_nV: Tensor | None = None
        for index, rows in enumerate(_chunks(len(hidden_NH), ctx.chunk_rows)):
            again = index >= len(kept)
            raw_nV = head.raw_logits(hidden_NH[rows], weight_VH, bias_V) if again else kept[index]
            space_nV = torch.empty_like(raw_nV) if space_nV is None else space_nV[: len(raw_nV)]
            for some, block in _blocks(rows, raw_nV):
                _write_grad(
                    space_nV[block],
                    raw_nV[block],
                    head,
                    ctx.temperature,
                    targets_N[some],
                    log_sum_N[some, None],
                    entropy_N[some, None],
                    *(None if grad_N is None else grad_N[some, None] for grad_N in grads),
                )
            if grad_bias_V is not None:
                grad_bias_V += space_nV.sum(dim=0)
            grad_nV = space_nV.to(weight_VH.dtype)
            if grad_hidden_NH is not None:
                torch.mm(grad_nV, weight_VH, out=grad_hidden_NH[rows])
            if ctx.holder is not None:
                add_product(ctx.holder, grad_nV, hidden_NH[rows])
            elif grad_weight_VH is not None and grad_weight_VH.dtype == grad_nV.dtype:
                grad_weight_VH.addmm_(grad_nV.T, hidden_NH[rows])
            elif grad_weight_VH is not None:
                grad_weight_VH += grad_nV.T @ hidden_NH[rows]
        if grad_weight_VH is not None:
            grad_weight_VH = grad_weight_VH.to(weight_VH.dtype)
        if grad_bias_V is not None:
            grad_bias_V = grad_bias_V.to(weight_VH.dtype)
        return grad_hidden_NH, grad_weight_VH, grad_bias_V, *(None,) * 6


def _write_grad(
    out_nV: Tensor,
    raw_nV: Tensor,
    head: Head,
    temperature: float,
    targets_n: Tensor,
    log_sum_n1: Tensor,
    entropy_n1: Tensor,
    grad_logprobs_n1: Tensor | None,
    grad_entropy_n1: Tensor | None,
) -> None:
    """Write the (n, V) gradient of the linear layer's output.

    With p = softmax(z): d logp_y / dz = onehot_y - p, and d entropy / dz = -p * (log p + entropy).
    """
    capped_nV = head.cap(raw_nV)
    torch.sub(_tempered(capped_nV, temperature), log_sum_n1, out=out_nV)
    factor = torch.zeros_like(log_sum_n1) if grad_logprobs_n1 is None else -grad_logprobs_n1
    if grad_entropy_n1 is not None:
        factor = factor - grad_entropy_n1 * (_finite(out_nV) + entropy_n1)
    out_nV.exp_().mul_(factor)
    if grad_logprobs_n1 is not None:
        out_nV.scatter_add_(1, targets_n[:, None], grad_logprobs_n1.to(out_nV.dtype))
    if head.scale != temperature:
        out_nV *= head.scale / temperature
    if head.softcap:
        out_nV *= 1.0 - (capped_nV / head.softcap) ** 2


def _tempered(logits_nV: Tensor, temperature: float) -> Tensor:
    """Logits / temperature; the same tensor if that changes nothing."""
    return logits_nV if temperature == 1.0 else logits_nV / temperature


def _weighted(masses_nV: Tensor, logits_nV: Tensor) -> Tensor:
    """(n,) sum of mass times logit; a token that the model excludes, with a logit of -inf, adds 0."""
    if logits_nV.device.type == "cpu":
        sum_n: Tensor = torch.linalg.vecdot(masses_nV, logits_nV)
        if not sum_n.isnan().any():  # models that exclude tokens are rare, and checking for them is another pass
            return sum_n
    finite_n: Tensor = torch.linalg.vecdot(masses_nV, _finite(logits_nV))
    return finite_n


def _finite(values_nV: Tensor) -> Tensor:
    """-inf replaced by the lowest number: an excluded token has probability 0 and adds 0, not NaN."""
    return values_nV.clamp_min(torch.finfo(values_nV.dtype).min)


def _chunks(num: int, most: int) -> list[slice]:
    """Slices of at most `most` rows, of nearly equal size."""
    size = math.ceil(num / max(1, math.ceil(num / most)))
    return [slice(start, min(start + size, num)) for start in range(0, num, size)] if num else []


def _blocks(rows: slice, raw_nV: Tensor) -> list[tuple[slice, slice]]:
    """Blocks of a chunk's rows, as slices of all rows and of the chunk. On an accelerator the whole chunk is one
    block."""
    most = BLOCK_ELEMENTS // raw_nV.shape[1] if raw_nV.device.type == "cpu" else len(raw_nV)
    within = _chunks(len(raw_nV), max(1, most))
    return [(slice(rows.start + size.start, rows.start + size.stop), size) for size in within]
