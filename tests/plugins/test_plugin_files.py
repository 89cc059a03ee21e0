"""Plugins in plain files: where their paths count from, and which letters they may have."""

from pathlib import Path

import pytest

from rlcore.plugins import configure

NULL = ("model.path=none", "data.sources.all.path=prompts.jsonl", "reward.functions.letters.fn=half")
GOOD = """
from rlcore import RewardFunction, hookimpl

RLCORE_API = "1"

@hookimpl
def rlcore_reward_functions():
    return [RewardFunction("half", "math:sqrt")]
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a plugin and a configuration that enables it; another is the working directory."""
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    project.mkdir()
    elsewhere.mkdir()
    (project / "mine.py").write_text(GOOD)
    (project / "c.yaml").write_text("plugins: {mine: {path: mine.py}}")
    monkeypatch.chdir(elsewhere)
    return project


def test_a_path_in_a_file_counts_from_its_directory_and_is_saved_absolute(project: Path) -> None:
    for file in (project / "c.yaml", Path("../project/c.yaml")):
        hooks, loaded = configure([file], NULL)
        assert [provider.plugin for provider in hooks.providers()] == ["mine"]
        saved = loaded.saved["plugins"]["mine"]["path"]
        assert Path(saved).is_absolute()
        assert Path(saved).resolve() == project / "mine.py"


def test_a_path_of_an_override_and_one_that_is_only_there_count_from_the_working_directory(project: Path) -> None:
    Path("mine.py").write_text(GOOD.replace("half", "other"))
    hooks, _ = configure([project / "c.yaml"], [*NULL, "plugins.mine.path=mine.py"])
    assert [offer.value.name for offer in hooks.reward_functions() if offer.provider.plugin == "mine"] == ["other"]
    (project / "mine.py").unlink()
    hooks, _ = configure([project / "c.yaml"], NULL)
    assert [offer.value.name for offer in hooks.reward_functions() if offer.provider.plugin == "mine"] == ["other"]


def test_a_path_may_have_any_letter(project: Path) -> None:
    place = project / "\U0001f642 \u00e9"
    place.mkdir()
    (project / "mine.py").rename(place / "mine.py")
    _, loaded = configure([], NULL, [str(place / "mine.py")])
    assert loaded.values["plugins.mine.path"] == str(place / "mine.py")
