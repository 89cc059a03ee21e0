"""`pytest -m fault` imports the files that name the mark, and no test can hide from it."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

NAMED = "import pytest\n\n\n@pytest.mark.fault\ndef test_a():\n    pass\n"
OTHER = "def test_b():\n    pass\n"


@pytest.fixture
def marked_files(request: pytest.FixtureRequest) -> Any:
    """The plugin of tests/conftest.py, as this session has it."""
    [found] = [found for found in request.config.pluginmanager.get_plugins() if type(found).__name__ == "MarkedFiles"]
    return found


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    def written(text: str) -> Path:
        path = tmp_path / "test_x.py"
        path.write_text(text)
        return path

    return written


@pytest.mark.parametrize(
    ("text", "markexpr", "ignored"),
    [
        (NAMED, "fault", None),
        (OTHER, "fault", True),
        (OTHER, "slow", True),
        (NAMED, "real", True),
        (OTHER, "not fault and not real and not gpu and not browser and not slow", None),
        (OTHER, "fault or real", None),
        (OTHER, "", None),
    ],
)
def test_a_file_is_passed_over_where_one_mark_is_wanted_that_it_does_not_name(
    text: str, markexpr: str, ignored: bool | None, marked_files: Any, write: Callable[[str], Path]
) -> None:
    config = SimpleNamespace(option=SimpleNamespace(markexpr=markexpr))
    assert marked_files.pytest_ignore_collect(write(text), config) is ignored
    assert marked_files.pytest_ignore_collect(write(text).parent, config) is None


@pytest.mark.parametrize(("text", "refused"), [(NAMED, False), (OTHER, True)])
def test_a_test_whose_file_does_not_name_its_mark_is_refused(
    text: str, refused: bool, marked_files: Any, write: Callable[[str], Path]
) -> None:
    marked = SimpleNamespace(path=write(text), get_closest_marker=lambda name: name == "fault")
    plain = SimpleNamespace(path=Path(__file__), get_closest_marker=lambda name: None)
    if not refused:
        marked_files.pytest_collection_modifyitems([marked, plain])
        return
    with pytest.raises(pytest.UsageError, match=r"test_x.py: has tests of the mark 'fault' and does not name it, .*"):
        marked_files.pytest_collection_modifyitems([marked, plain])
