"""Makes the machines shared by tests of plans importable; they are in this directory."""

import sys
from pathlib import Path

import pytest

import rlcore.plugins

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library next to the plugin, as if it were installed."""
    monkeypatch.setattr(rlcore.plugins, "_installed_for_gpus", lambda: [("vllm", "vllm")])
