"""`rlcore plugins new --update`: a newer template replaces what its author has not changed, and nothing else."""

import json
from pathlib import Path

import pytest

from rlcore.cli import main, new_plugin, plugin_file, plugin_package
from rlcore.cli.plugin_update import RECORD


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package whose commands were not run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(new_plugin, "try_package", lambda package: 0.0)
    assert main(["plugins", "new", "mine", "--offers", "reward,order"]) == 0
    return tmp_path / "rlcore-mine"


@pytest.fixture
def newer(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A template whose Makefile, AGENTS.md and reward have another last line."""
    old = plugin_package.template
    changed = ("Makefile.txt", "AGENTS.md.txt", "reward.py.txt")
    monkeypatch.setattr(
        plugin_package, "template", lambda name: old(name) + ("# newer @name@\n" if name in changed else "")
    )


def texts(package: Path) -> dict[str, str]:
    return {str(path.relative_to(package)): path.read_text() for path in package.rglob("*") if path.is_file()}


def actions_of(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    lines = [line.partition(": ") for line in capsys.readouterr().out.splitlines()]
    return {name: action for name, _, action in lines}


def test_the_record_has_every_file_that_was_written(package: Path) -> None:
    record = json.loads((package / RECORD).read_text())
    assert record["offers"] == ["reward", "order"]
    assert record["files"].keys() | {RECORD} == texts(package).keys()


def test_without_a_newer_template_nothing_is_done(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (package / "Makefile").write_text("all:\n")
    (package / "AGENTS.md").unlink()
    before = texts(package)
    capsys.readouterr()
    assert main(["plugins", "new", "mine", "--update"]) == 0
    actions = actions_of(capsys)
    assert (actions.pop("Makefile"), actions.pop("AGENTS.md")) == ("kept: changed by you only", "kept: removed by you")
    assert set(actions.values()) == {"up to date"}
    assert texts(package) == before


@pytest.mark.usefixtures("newer")
def test_a_name_in_another_spelling_updates_the_same_package(package: Path, tmp_path: Path) -> None:
    package.rename(tmp_path / "rlcore-my-thing")
    assert main(["plugins", "new", "my-thing", "--update"]) == 0
    assert "my_thing" in (tmp_path / "rlcore-my-thing" / "Makefile").read_text()
    assert "newer my_thing" in (tmp_path / "rlcore-my-thing" / "AGENTS.md").read_text()


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["my.thing"], "'my.thing' is not a lower-case Python identifier"),
        (["mine", "--offers", "reward"], "--offers has no effect with --update"),
        (["mine", "--offers=order"], "--offers has no effect with --update"),
        (["mine", "--file"], "--file has no effect with --update"),
    ],
)
def test_what_an_update_cannot_do_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plugins", "new", *arguments, "--update"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("newer")
def test_changed_files_stay_and_the_others_are_replaced(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (package / "rlcore_mine" / "reward.py").write_text("mine = 1\n")
    (package / "AGENTS.md").unlink()
    (package / "notes.txt").write_text("mine")
    before = texts(package)
    capsys.readouterr()
    assert main(["plugins", "new", "mine", "--update", "--dry-run"]) == 0
    planned = actions_of(capsys)
    assert planned.pop("nothing was written") == "--dry-run"
    assert texts(package) == before
    assert main(["plugins", "new", "mine", "--update"]) == 0
    actions = actions_of(capsys)
    assert actions == planned
    assert actions["Makefile"] == "replaced"
    assert actions["rlcore_mine/reward.py"] == "kept: changed by you; the template's is rlcore_mine/reward.py.new"
    assert actions["AGENTS.md"] == "kept: removed by you, and changed in the template"
    after = texts(package)
    assert after["Makefile"] == before["Makefile"] + "# newer mine\n"
    assert after["rlcore_mine/reward.py"] == "mine = 1\n"
    assert after["rlcore_mine/reward.py.new"].endswith("# newer mine\n")
    unchanged = before.keys() - {"Makefile", RECORD}
    assert {name: after[name] for name in unchanged} == {name: before[name] for name in unchanged}
    assert after.keys() - before.keys() == {"rlcore_mine/reward.py.new"}


@pytest.mark.usefixtures("newer")
def test_a_second_update_writes_nothing(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (package / "rlcore_mine" / "reward.py").write_text("mine = 1\n")
    assert main(["plugins", "new", "mine", "--update"]) == 0
    (package / "rlcore_mine" / "reward.py.new").unlink()
    before = texts(package)
    capsys.readouterr()
    assert main(["plugins", "new", "mine", "--update"]) == 0
    assert actions_of(capsys)["rlcore_mine/reward.py"] == "kept: changed by you only"
    assert texts(package) == before


def test_files_that_joined_or_left_the_template_are_named(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = json.loads((package / RECORD).read_text())
    record["files"]["setup.cfg"] = "0" * 64
    del record["files"]["Makefile"]
    (package / RECORD).write_text(json.dumps(record))
    (package / "Makefile").unlink()
    capsys.readouterr()
    assert main(["plugins", "new", "mine", "--update"]) == 0
    actions = actions_of(capsys)
    assert (actions["Makefile"], actions["setup.cfg"]) == ("added", "kept: no longer part of the template")
    assert (package / "Makefile").is_file()


def test_a_package_made_of_one_file_takes_a_newer_template_and_keeps_its_module(
    package: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(package.parent)
    monkeypatch.setattr(plugin_file, "try_package", lambda package: 0.0)
    offers = plugin_package.chosen_offers("judge,tracker", plugin_package.known_offers())
    Path("other.py").write_text(plugin_file.file_text("other", offers))
    assert main(["plugins", "package", "other.py"]) == 0
    made = Path("rlcore-other")
    before = texts(made)
    capsys.readouterr()
    assert main(["plugins", "new", "other", "--update"]) == 0
    assert set(actions_of(capsys).values()) == {"up to date"}
    assert texts(made) == before
    request.getfixturevalue("newer")
    assert main(["plugins", "new", "other", "--update"]) == 0
    actions, after = actions_of(capsys), texts(made)
    assert {name for name, action in actions.items() if action == "replaced"} == {"Makefile", "AGENTS.md"}
    assert after["Makefile"] == before["Makefile"] + "# newer other\n"
    changed = {"Makefile", "AGENTS.md", RECORD}
    assert {name: text for name, text in after.items() if name not in changed} == {
        name: text for name, text in before.items() if name not in changed
    }
    assert "rlcore-reward-loop>=0.1,<0.2" in after["pyproject.toml"]


@pytest.mark.parametrize(
    ("arguments", "record", "words"),
    [
        (
            ["other", "--update"],
            None,
            "'rlcore-other' has no .rlcore-template.json; needs a package that",
        ),
        (["mine", "--update"], "{", ".rlcore-template.json' is damaged"),
        (["mine", "--update"], '{"offers": ["gone"], "files": {}}', "is damaged: offers ['gone']; restore it"),
        (["mine", "--update"], '{"offers": ["file"], "files": {}}', "is damaged: KeyError('file'); restore it"),
        (["mine", "--dry-run"], None, "--dry-run has no effect; needs --update"),
    ],
)
def test_what_cannot_be_updated_is_refused_in_one_line(
    package: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], record: str | None, words: str
) -> None:
    if record is not None:
        (package / RECORD).write_text(record)
    capsys.readouterr()
    assert main(["plugins", "new", *arguments]) == 2
    assert words in capsys.readouterr().err
