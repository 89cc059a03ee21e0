"""Modules that a reward's file needs and this Python lacks are seen before the run."""

from pathlib import Path

import pytest

from rlcore.plugins.planning import plan_run
from rlcore.runtime.reward_imports import missing_imports
from rlcore.testing.runs import run_settings

SCORE = "\ndef score(completions, **columns): return [1.0 for _ in completions]\n"


def notes(directory: Path, text: str) -> list[str]:
    (directory / "rew.py").write_text(text + SCORE)
    settings = run_settings(directory, 4, **{"reward.functions.letters.fn": f"{directory}/rew.py:score"})
    return list(missing_imports(plan_run([settings], [], ["null"])))


@pytest.mark.parametrize("line", ["import no_such_thing.inner as x", "from no_such_thing import y"])
def test_a_module_that_is_not_there_is_named_with_file_and_line(tmp_path: Path, line: str) -> None:
    (note,) = notes(tmp_path, f"import json\n{line}")
    assert f"reward.functions.letters: {tmp_path}/rew.py:2 imports 'no_such_thing', which this Python does not" in note
    assert "put no_such_thing.py next to the file" in note


@pytest.mark.parametrize(
    "text",
    [
        "import json, os.path\nfrom collections.abc import Mapping",
        "import beside, package.inner",
        "try:\n    import no_such_thing\nexcept ImportError:\n    pass",
        "import sys\nsys.path.insert(0, '/x')\nimport no_such_thing",
        "def later():\n    import no_such_thing",
    ],
)
def test_what_is_there_optional_or_cannot_be_known_is_not_noted(tmp_path: Path, text: str) -> None:
    (tmp_path / "beside.py").write_text("")
    (tmp_path / "package").mkdir()
    assert notes(tmp_path, text) == []
