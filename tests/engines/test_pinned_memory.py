"""Offloaded state takes as much pinned memory as the plan counts."""

import os
from pathlib import Path

import pytest
import torch

from rlcore.engines.pinned_memory import pin_exactly

NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
OURS = "pinned_max_round_threshold_mb:1"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {NAMES[1]: OURS}),
        ({NAMES[1]: "expandable_segments:True"}, {NAMES[1]: f"expandable_segments:True,{OURS}"}),
        ({NAMES[0]: "expandable_segments:True"}, {NAMES[0]: f"expandable_segments:True,{OURS}"}),
        ({NAMES[0]: "", NAMES[1]: "max_split_size_mb:64"}, {NAMES[0]: OURS, NAMES[1]: "max_split_size_mb:64"}),
        ({NAMES[1]: "pinned_max_round_threshold_mb:64"}, {NAMES[1]: "pinned_max_round_threshold_mb:64"}),
    ],
)
def test_the_setting_is_added_to_those_of_the_user(
    monkeypatch: pytest.MonkeyPatch, before: dict[str, str], after: dict[str, str]
) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    pin_exactly()
    pin_exactly()
    assert {name: os.environ[name] for name in NAMES if name in os.environ} == after


def test_this_torch_has_the_setting() -> None:
    """A build without CUDA accepts any name, and one with CUDA refuses those that it does not have."""
    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    assert OURS.partition(":")[0].encode() in library.read_bytes()
