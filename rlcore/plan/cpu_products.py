"""Finds out, without torch, whether this CPU has instructions for products of bfloat16 matrices."""

import os
from functools import cache
from pathlib import Path

MAX_ISA = "ONEDNN_MAX_CPU_ISA"
"""oneDNN's own variable: the best instructions that it may use. torch multiplies bfloat16 with oneDNN."""
_WITHOUT = frozenset({"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"})
"""Its values without products of bfloat16."""
_BEST_FIRST = ("amx_bf16", "avx512_bf16")


def bfloat16_instructions() -> str:
    """The CPU's instructions for products of bfloat16; empty if there are none or oneDNN may not use them."""
    return "" if os.environ.get(MAX_ISA, "").upper() in _WITHOUT else _of_this_cpu()


def listed_instructions(cpuinfo: str) -> str:
    """The best of these instructions in a text of /proc/cpuinfo; empty if it lists none."""
    flags = next((line.split() for line in cpuinfo.splitlines() if line.startswith("flags")), [])
    return next((name for name in _BEST_FIRST if name in flags), "")


@cache
def _of_this_cpu() -> str:
    try:
        return listed_instructions(Path("/proc/cpuinfo").read_text())
    except OSError:
        return ""
