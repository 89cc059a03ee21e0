"""Files that a target names: `rlcore.imports.import_target`, in this process and in children."""

import asyncio
import sys
from pathlib import Path

import pytest

from rlcore.cluster.child import ChildProcesses
from rlcore.imports import import_target


@pytest.fixture(autouse=True)
def _search_path_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])


def test_a_file_is_loaded_once_and_sees_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "rlcore_test_neighbour.py").write_text("value = 41")
    (tmp_path / "scorer.py").write_text(
        "import rlcore_test_neighbour\nclass A:\n    x = rlcore_test_neighbour.value + 1"
    )
    assert import_target(f"{tmp_path / 'scorer.py'}:A.x") == 42
    assert import_target(f"{tmp_path / 'scorer.py'}:A") is import_target(f"{tmp_path / 'scorer.py'}:A")


def test_a_childs_file_imports_its_own_neighbour_although_the_parent_imported_another_of_that_name(
    tmp_path: Path,
) -> None:
    files = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rlcore_test_twin.py").write_text(f"value = {name!r}")
        files.append(tmp_path / name / "scorer.py")
        files[-1].write_text(
            "import rlcore_test_twin\nclass A:\n    def value(self):\n        return rlcore_test_twin.value"
        )

    async def values() -> list[str]:
        children = ChildProcesses()
        try:
            started = [await children.start(f"{file}:A", name="twin") for file in files]
            return [await child.call("value", deadline_s=10.0) for child in started]
        finally:
            await children.close()

    for file in files:
        import_target(f"{file}:A")
        assert asyncio.run(values()) == ["first", "second"]
