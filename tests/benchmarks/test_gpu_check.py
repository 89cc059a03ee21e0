"""The record of `make gpu-check`."""

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def check() -> Iterator[Any]:
    """The module; the benchmarks import each other by their bare names, as scripts of one folder do."""
    sys.path.insert(0, str(BENCHMARKS))
    before = set(sys.modules)
    try:
        yield import_module("gpu_check")
    finally:
        sys.path.remove(str(BENCHMARKS))
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(BENCHMARKS)):
                del sys.modules[name]


def test_a_gpu_check_adds_parts_to_an_earlier_record(
    check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "gpu"
    assert check.earlier(out) == {}
    own = ["--device", "cpu", "--tiny", "--out", str(out), "--only"]
    check.main([*own, "tests"])
    monkeypatch.setitem(check.PARTS, "head_chunks", lambda of: {"seconds": {"16": 0.5}, "shapes": of.shapes})
    check.main([*own, "head_chunks", "--add"])
    assert set(check.earlier(out)) == {"tests", "head_chunks"}
    assert "| 16 | 0.500 |" in out.with_suffix(".md").read_text()
    check.main([*own, "head_chunks"])
    assert set(check.earlier(out)) == {"head_chunks"}
