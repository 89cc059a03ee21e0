"""Makes the modules shared by tests of engines importable; they are in this directory."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import pytest

from rlcore.plan.cpu_products import MAX_ISA, bfloat16_instructions


@pytest.fixture
def native_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's products of bfloat16, which other tests do without; skips where it has none."""
    monkeypatch.setenv(MAX_ISA, "DEFAULT")
    if not bfloat16_instructions():
        pytest.skip("this CPU has no products of bfloat16")
