"""Rounds float32 master weights to half precision, to nearest or stochastically.

A bfloat16 weight of 0.1 has neighbours 5e-4 away, and an update of RL moves its master by 1e-5: rounded to nearest, the
weight stays fixed for tens of updates while its master moves. Stochastic rounding goes up with a probability
proportional to the distance, so on average the weights move like the masters (arXiv 1502.02551).

The random numbers are a hash of (seed, update, parameter, element): stateless, the same on every device, and a rank
with a shard of a parameter draws those of its shard.
"""

import hashlib
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rlcore.engines.hf.train.sharded_tensors import own, place, rows_of

Rounding = Literal["stochastic", "nearest"]
CHUNK = {"cpu": 2**17, "cuda": 2**24}
"""Elements that are rounded at a time: as many as fit into a CPU's cache, or keep a GPU busy."""
HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class RoundingKey:
    """The seed of the random numbers of one parameter in one update."""

    seed: int
    update: int
    parameter: int

    def numbers(self) -> tuple[int, int]:
        """An odd multiplier and an offset, signed 32-bit."""
        text = f"{self.seed} {self.update} {self.parameter}".encode()
        digest = hashlib.blake2b(text, digest_size=8, person=b"rounding").digest()
        multiplier, offset = (int.from_bytes(half, "little", signed=True) for half in (digest[:4], digest[4:]))
        return multiplier | 1, offset


@torch.no_grad()
def publish(weight: Tensor, master: Tensor, rounding: Rounding, key: RoundingKey) -> None:
    """Write a float32 master into its half-precision weight, in place; for sharded tensors, this rank's part.

    nearest: ties to even. stochastic: to one of the two neighbours, up with the probability of the distance from the
    lower one, so the expectation is the master itself. Numbers that the format holds stay exact, infinities and NaN are
    kept, and a finite number stays finite: beyond the largest number of the format it becomes that number. Stochastic
    rounding needs a few temporary arrays of `CHUNK` elements.
    """
    mine, source = own(weight), own(master)
    if rounding == "nearest" or not mine.numel():
        mine.copy_(source)
        return
    target = mine if mine.is_contiguous() else torch.empty_like(mine, memory_format=torch.contiguous_format)
    flat, values = target.view(-1), source.contiguous().view(-1)
    first = rows_of(len(weight), *place(weight)).start * (mine.numel() // len(mine)) if weight.ndim else 0
    size = CHUNK.get(mine.device.type, CHUNK["cpu"])
    multiplier, offset = key.numbers()
    for start in range(0, len(flat), size):
        chunk = values[start : start + size]
        bits = _random_bits(first + start, len(chunk), multiplier, offset, chunk.device)
        rounded = _bfloat16(chunk, bits) if mine.dtype == torch.bfloat16 else _float16(chunk, bits)
        flat[start : start + size] = _kept_finite(rounded, chunk, mine.dtype)
    if target is not mine:
        mine.copy_(target)


def _random_bits(first: int, num: int, multiplier: int, offset: int, device: torch.device) -> Tensor:
    """(num,) int32, for the elements from `first` on: a Weyl sequence through a mixer, whose last step is `_mixed`.

    The upper 16 bits are random before that step, which does not change them. Multiplications wrap around. The mixer is
    lowbias32 of github.com/skeeto/hash-prospector without its first shift, which a random multiplier makes superfluous.
    """
    begin = _signed32(first * multiplier + offset)
    bits = torch.arange(num, dtype=torch.int32, device=device).mul_(multiplier).add_(begin)
    bits.mul_(0x7FEB352D)
    bits ^= _shifted(bits, 15)
    return bits.mul_(_signed32(0x846CA68B))


def _mixed(bits: Tensor) -> Tensor:
    """All 32 bits random."""
    return bits.bitwise_xor_(_shifted(bits, 16))


def _shifted(bits: Tensor, by: int) -> Tensor:
    """The bits moved to the right, with zeros from the left."""
    return (bits >> by).bitwise_and_((1 << (32 - by)) - 1)


def _bfloat16(values: Tensor, bits: Tensor) -> Tensor:
    """Float32 numbers rounded to bfloat16: 16 random bits are added below its mantissa, then cut off.

    The carry may reach the exponent. The sign is a separate bit, so magnitudes are rounded.
    """
    return _shifted(bits, 16).add_(values.view(torch.int32)).bitwise_and_(-0x10000).view(torch.float32)


def _float16(values: Tensor, bits: Tensor) -> Tensor:
    """Float32 numbers rounded to float16: as `_bfloat16` with 13 bits; below 2^-14 its numbers are 2^-24 apart."""
    bits = _mixed(bits)
    added = _shifted(bits, 19).add_(values.view(torch.int32)).bitwise_and_(-0x2000).view(torch.float32)
    steps = values.abs().mul_(2.0**24)
    lower = steps.floor()
    up = _shifted(bits, 8).to(torch.float32).mul_(2.0**-24) < steps.sub_(lower)
    small = lower.add_(up).mul_(2.0**-24).copysign_(values)
    return torch.where(values.abs() < 2.0**-14, small, added)


def _kept_finite(rounded: Tensor, values: Tensor, dtype: torch.dtype) -> Tensor:
    """Finite numbers clamped to the format's range; other values unchanged."""
    largest = torch.finfo(dtype).max
    if values.device.type == "cpu":
        lowest, highest = torch.aminmax(values)
        if -largest < lowest and highest < largest:  # false for NaN
            return rounded
    return torch.where(values.isfinite(), rounded.clamp_(-largest, largest), values)


def _signed32(number: int) -> int:
    """The number modulo 2^32, as a signed integer."""
    return (number + 2**31) % 2**32 - 2**31
