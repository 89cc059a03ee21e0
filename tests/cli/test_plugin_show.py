"""`rlcore plugins show`: offers, settings and versions of installed plugins and of files."""

import json
from pathlib import Path

import pytest

from rlcore.cli import main
from rlcore.cli.plugin_show import describe_plugin, readme_section

ROOT = Path(__file__).parents[2]


def test_an_installed_plugin_is_described_with_its_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "show", "critic_engine", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["distribution"], found["needs"]) == ("rlcore-critic-engine", "<0.2,>=0.1")
    assert "critic engine critic_engine" in found["offers"]
    settings = {row["key"]: row for row in found["settings"]}
    assert settings["plugins.critic_engine.value_clip"]["default"] == "0.2"
    assert "plugins.critic_engine.lora.rank" in settings
    assert all(row["meaning"] for row in found["settings"])


def test_people_get_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "show", "ray"]) == 0
    shown = capsys.readouterr().out
    assert "rlcore-ray" in shown
    assert "cluster ray" in shown
    assert "plugins.ray.address" in shown


def test_a_file_is_described_too(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        'RLCORE_API = "1"\nfrom rlcore import RewardFunction, hookimpl\n\n\n@hookimpl\n'
        'def rlcore_reward_functions():\n    return [RewardFunction("short", "mine:short")]\n'
    )
    found = describe_plugin(str(file))
    assert (found["plugin"], found["offers"], found["settings"]) == ("mine", ["reward function short"], [])
    assert found["needs"] == ""


def test_a_plugin_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "show", "critic_enginee"]) == 2
    assert "critic_engine" in capsys.readouterr().err


@pytest.mark.parametrize("plugin", ["agent_loop", "critic_engine", "ray", "reward_loop", "vllm"])
def test_the_section_of_a_readme_is_what_is_shown(plugin: str) -> None:
    text = (ROOT / "plugins" / plugin / "README.md").read_text("utf-8")
    section = readme_section(describe_plugin(plugin))
    assert section in text, f"run: rlcore plugins show {plugin} --readme plugins/{plugin}/README.md"
    assert text.count("<!-- rlcore plugins show") == 1


def test_a_section_has_every_setting_those_of_entries_too() -> None:
    section = readme_section(describe_plugin("reward_loop"))
    for key in ("rewards", "rewards.NAME.judge.template", "models.NAME.path", "audit"):
        assert f"| `plugins.reward_loop.{key}` |" in section
    assert "- reward manager reward_loop\n" in section
    assert all(line.count("|") - line.count("\\|") == 4 for line in section.splitlines() if line.startswith("|"))


def test_a_section_is_written_in_the_place_of_an_older_one(tmp_path: Path) -> None:
    readme, command = tmp_path / "README.md", ["plugins", "show", "ray", "--readme", str(tmp_path / "README.md")]
    readme.write_text("# Mine\n")
    assert main(command) == 0
    first = readme.read_text()
    assert first.startswith("# Mine\n\n<!-- rlcore plugins show ray -->\n")
    readme.write_text(first.replace("cluster ray", "cluster old") + "\nThe end.\n")
    assert main(command) == 0
    assert readme.read_text() == first + "\nThe end.\n"


@pytest.mark.parametrize(
    ("text", "words"), [(None, "is not a file"), ("<!-- rlcore plugins show ray -->\nx", "a beginning and no end")]
)
def test_a_file_that_cannot_have_the_section_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, words: str
) -> None:
    readme = tmp_path / "README.md"
    if text is not None:
        readme.write_text(text)
    assert main(["plugins", "show", "ray", "--readme", str(readme)]) == 2
    assert words in capsys.readouterr().err
