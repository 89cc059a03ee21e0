"""Instructions for products of bfloat16, from Linux's list of a CPU's flags and oneDNN's variable."""

import subprocess
import sys

import pytest
import torch

from rlcore.plan.cpu_products import MAX_ISA, bfloat16_instructions, listed_instructions

CPUINFO = """processor\t: 0
model name\t: avx512_bf16 in its name
flags\t\t: fpu {flags} avx512f

processor\t: 1
flags\t\t: fpu
"""


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ("avx512_bf16 amx_bf16", "amx_bf16"),
        ("avx512_bf16", "avx512_bf16"),
        ("avx512_bf161", ""),
        ("avx512_vnni", ""),
    ],
)
def test_the_best_instructions_of_the_first_core_count(flags: str, found: str) -> None:
    assert listed_instructions(CPUINFO.format(flags=flags)) == found


def test_a_machine_that_lists_no_flags_has_none() -> None:
    assert listed_instructions("") == listed_instructions("processor : 0\nFeatures : bf16\n") == ""


def test_this_machine_has_what_torch_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MAX_ISA, "DEFAULT")
    found = torch.cpu.get_capabilities()
    assert bool(bfloat16_instructions()) == bool(found.get("avx512_bf16") or found.get("amx_bf16"))


@pytest.mark.parametrize("limit", ["AVX2", "avx512_core", "AVX512_CORE_VNNI"])
def test_a_limit_of_onednn_below_them_means_none(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MAX_ISA, limit)
    assert bfloat16_instructions() == ""


def test_the_tests_see_none() -> None:
    assert bfloat16_instructions() == ""


def test_finding_out_imports_no_torch() -> None:
    code = "import sys, rlcore.runtime.machine as m; m.machine_facts(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
