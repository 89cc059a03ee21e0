"""Descriptors that a block leaves open, and those that a process may keep."""

from pathlib import Path

import pytest

from rlcore.testing import leaks as module
from rlcore.testing.leaks import Leaked, leaks


def test_a_descriptor_that_a_block_leaves_open_is_named_unless_it_is_the_drivers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.1)
    device, other = tmp_path / "nvidia0", tmp_path / "other"
    for path in (device, other):
        path.touch()
    with pytest.raises(Leaked, match=rf"^left behind: descriptor \d+ \({other}\)$"), leaks():
        left = other.open()
    left.close()
    monkeypatch.setattr(module, "OF_DRIVER", str(tmp_path / "nvidia"))
    with leaks():
        kept = device.open()
    kept.close()
