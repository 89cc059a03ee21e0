"""`rlcore plugins show`: offers, settings and versions of installed plugins and of files."""

import json
from pathlib import Path

import pytest

from rlcore.cli import main
from rlcore.cli.plugin_show import describe_plugin


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
