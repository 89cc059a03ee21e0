"""A reward file whose import fails: the line at fault, and a remedy that fits what is wrong."""

import sys
from pathlib import Path

import pytest

from rlcore.errors import PluginError
from rlcore.reward.served import ServedReward
from rlcore.reward.spec import FunctionSpec


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory for a user's files, with two installed libraries that cannot be imported."""
    installed = tmp_path / "own" / ".venv" / "site-packages"
    for name, text in {
        "rl_broken": 'raise OSError("libcudart.so.12: cannot open shared object file")',
        "rl_needy": "import rl_absent",
    }.items():
        (installed / name).mkdir(parents=True)
        (installed / name / "__init__.py").write_text("from . import core\n")
        (installed / name / "core.py").write_text(f"\n{text}\n")
    (tmp_path / "own" / "rl_helper.py").write_text("import json\nimport rl_absent\n")
    monkeypatch.syspath_prepend(str(installed))
    monkeypatch.chdir(tmp_path / "own")
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path / "own"


@pytest.mark.parametrize(
    ("line", "found", "helps"),
    [
        ("import rl_absent", "rew.py:2: ModuleNotFoundError: No module named 'rl_absent';", "install 'rl_absent' into"),
        ("import rl_helper", "rl_helper.py:2: ModuleNotFoundError: No module", "or put rl_absent.py next to the file"),
        (
            "import json.absent",
            "rew.py:2: ModuleNotFound",
            "'json' is installed and does not have that module: correct",
        ),
        (
            "from json import absent",
            "rew.py:2: ImportError",
            "'json' is there: correct the name, or use another version",
        ),
        (
            "import rl_needy",
            "rew.py:2: ModuleNotFound",
            "'rl_needy' is installed and needs it: install 'rl_absent' into",
        ),
        (
            "import rl_broken",
            "rew.py:2: OSError: libcudart.so.12: cannot open shared object file (in .venv/site-packages/",
            "'rl_broken' is installed but broken: `",
        ),
    ],
)
def test_the_line_and_the_remedy_fit_what_is_wrong(own: Path, line: str, found: str, helps: str) -> None:
    (own / "rew.py").write_text(f"\n{line}\ndef score(completions): return [1.0]\n")
    with pytest.raises(PluginError) as raised:
        ServedReward(FunctionSpec("ok", f"{own}/rew.py:score"))
    text = str(raised.value)
    assert text.startswith(f"reward function 'ok' ({own}/rew.py:score): importing it failed: {found}")
    assert helps in text
    assert ("install '" in text) == ("rl_absent" in helps), "what is installed is not to be installed again"


def test_an_error_in_the_file_itself_is_reported_with_its_line_only(own: Path) -> None:
    (own / "rew.py").write_text("\n1 / 0\ndef score(completions): return [1.0]\n")
    with pytest.raises(PluginError, match=r"importing it failed: rew\.py:2: ZeroDivisionError: division by zero$"):
        ServedReward(FunctionSpec("ok", f"{own}/rew.py:score"))
