"""What the plan says of reward functions, and which it refuses before any process starts."""

from pathlib import Path

import pytest

from rlcore.errors import ConfigError, RlcoreError
from rlcore.plan import Facts, RunPlan, make_plan
from rlcore.plugins import configure
from rlcore.testing.null import SETTINGS

FN = "reward.functions.letters.fn"


def plan(*overrides: str, plugins: tuple[str, ...] = ()) -> RunPlan:
    """The plan of the run of the plugin null with these overrides."""
    hooks, loaded = configure([], [*SETTINGS, *overrides], ["null", *plugins])
    return make_plan(loaded, hooks, Facts())


def refused(kind: type[RlcoreError], *overrides: str, plugins: tuple[str, ...] = ()) -> str:
    """The one line with which the plan is refused."""
    with pytest.raises(kind) as caught:
        plan(*overrides, plugins=plugins)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of the test."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_file_with_relative_imports_is_refused_with_its_module_form(here: Path) -> None:
    (here / "pack").mkdir()
    (here / "pack" / "__init__.py").write_text("")
    (here / "pack" / "mine.py").write_text("from .helpers import x\ndef score(trajectory):\n    return x\n")
    assert f"name it as pack.mine:name, with {here} on PYTHONPATH" in refused(ConfigError, f"{FN}=pack/mine.py:score")


def test_a_relative_import_with_a_way_out_is_not_refused(here: Path) -> None:
    (here / "mine.py").write_text(
        "try:\n    from .a import x\nexcept ImportError:\n    x = 1\ndef score(trajectory): ...\n"
    )
    assert plan(f"{FN}=mine.py:score").rewards[0].reference.endswith("mine.py:score")


def test_a_lambda_in_a_file_is_refused_by_its_name(here: Path) -> None:
    (here / "mine.py").write_text("score = lambda trajectory: 1.0\n")
    assert "mine.py: score is a lambda" in refused(ConfigError, f"{FN}=mine.py:score")
