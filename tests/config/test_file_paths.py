"""Files that a configuration file names count from its directory, then from the working directory."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlcore.config import load_config
from rlcore.config.providers import ConfigSection, Offer, Provider
from rlcore.testing.null import SETTINGS


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a configuration and data, below the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "task").mkdir()
    sources = {"train": {"path": "train.jsonl"}}
    text = yaml.safe_dump({"data": {"sources": sources}, "eval": {"sources": {"held": {"path": "held.jsonl"}}}})
    (tmp_path / "task" / "config.yaml").write_text(text)
    (tmp_path / "task" / "train.jsonl").write_text("{}\n")
    (tmp_path / "held.jsonl").write_text("{}\n")
    return tmp_path / "task"


def paths(*overrides: str) -> tuple[str, str, str]:
    """The paths of both sources, and the origin of the first."""
    without_data = [setting for setting in SETTINGS if not setting.startswith("data.")]
    loaded = load_config([Path("task/config.yaml")], [*without_data, *overrides], ())
    config = loaded.config
    assert loaded.values["data.sources.train.path"] in loaded.yaml
    return (
        config.data.sources["train"].path,
        config.eval.sources["held"].path,
        loaded.origins["data.sources.train.path"],
    )


@pytest.mark.usefixtures("project")
def test_a_path_counts_from_the_directory_of_its_file_if_the_data_is_there() -> None:
    assert paths() == ("task/train.jsonl", "held.jsonl", "task/config.yaml")


def test_the_directory_of_the_file_comes_before_the_working_directory(project: Path) -> None:
    (project.parent / "train.jsonl").write_text("{}\n")
    (project / "held.jsonl").write_text("{}\n")
    assert paths()[:2] == ("task/train.jsonl", "task/held.jsonl")


def test_a_configuration_that_is_a_link_counts_from_the_file_that_it_links_to(project: Path) -> None:
    (project / "config.yaml").rename(project.parent / "held.yaml")
    (project / "config.yaml").symlink_to(project.parent / "held.yaml")
    (project.parent / "train.jsonl").write_text("{}\n")
    assert paths()[0] == str(project.parent.resolve() / "train.jsonl")


@pytest.mark.usefixtures("project")
def test_a_path_of_the_command_line_counts_from_the_working_directory() -> None:
    override = "data.sources.train.path=train.jsonl"
    assert paths(override) == ("train.jsonl", "held.jsonl", f"override '{override}'")


def test_an_absolute_and_an_interpolated_path_stay(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA", "train")
    assert paths(f"data.sources.train.path={project}/train.jsonl")[0] == f"{project}/train.jsonl"
    (project / "config.yaml").write_text(
        "data: {sources: {train: {path: '${oc.env:DATA}.jsonl'}}}\neval: {sources: {held: {path: held.jsonl}}}\n"
    )
    assert paths()[0] == "train.jsonl"


def test_models_count_from_the_directory_of_the_file_too(project: Path) -> None:
    named = {"path": "org/model", "tokenizer": "bytes", "chat_template": "chat.jinja"}
    text = yaml.safe_dump({"model": named, "reference": {"path": "org/other"}, "algo": {"kl": {"placement": "loss"}}})
    (project / "models.yaml").write_text(text)
    for place in (project / "org/model", project / "bytes", project.parent / "org/model", project.parent / "org/other"):
        place.mkdir(parents=True)
    (project / "chat.jinja").touch()
    settings = [setting for setting in SETTINGS if not setting.startswith("model.")]

    def found(*overrides: str) -> list[str]:
        config = load_config([Path("task/models.yaml")], [*settings, *overrides], ()).config
        model = config.model
        return [model.path, model.tokenizer, model.chat_template, config.reference.path]

    assert found() == ["task/org/model", "bytes", "task/chat.jinja", "org/other"]
    assert found("model.path=org/model")[0] == "org/model", "on the command line it counts from the working directory"
    (project / "org/model").rmdir()
    (project.parent / "org/model").rmdir()
    assert found()[0] == "org/model", "a name on the Hub stays"


@dataclass(frozen=True)
class Judge:
    path: str = ""
    tokenizer: str = ""
    prompt: str = ""


def test_models_of_plugins_count_from_the_directory_of_the_file_too(project: Path) -> None:
    section = Offer(ConfigSection("judge", Judge), Provider("judge", "judge", "1"))
    (project / "judge").mkdir()
    (project / "bytes").mkdir()
    text = yaml.safe_dump({"plugins": {"judge": {"path": "judge", "tokenizer": "bytes", "prompt": "judge"}}})
    (project / "config.yaml").write_text(text)

    def found() -> Judge:
        loaded = load_config([Path("task/config.yaml")], SETTINGS, [section])
        assert loaded.values["plugins.judge.path"] in loaded.yaml
        return loaded.config.plugins["judge"]

    assert found() == Judge("task/judge", "bytes", "judge")
    (project / "judge").rmdir()
    (project / "judge").touch()
    assert found() == Judge("judge", "bytes", "judge"), "a model is a directory"


def saved(*overrides: str) -> dict[str, Any]:
    """The configuration that a run saves."""
    without_data = [setting for setting in SETTINGS if not setting.startswith("data.")]
    text = load_config([Path("task/config.yaml")], [*without_data, *overrides], ()).yaml
    return dict(yaml.safe_load(text))


def test_a_saved_configuration_names_its_files_from_any_directory(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = project.parent
    for place in (here / "model", here / "bytes", here / "now", here / "out/runs"):
        place.mkdir(parents=True)
    (here / "words.txt").touch()
    (here / "prompts.jsonl").touch()
    (project / "mine.py").touch()
    with (project / "config.yaml").open("a") as file:
        file.write("reward: {functions: {a: {fn: 'mine.py:a', post_process: 'math:sqrt'}, b: {fn: count_letter}}}\n")
    monkeypatch.setenv("MODEL", "model")
    config = saved(
        "train.dir=out/runs",
        "model.path=model",
        "model.tokenizer=bytes",
        "rollout.weights_dir=weights",
        "model.chat_template=${oc.env:MODEL}",
        "reward.functions.b.kwargs={lists: [words.txt, other.txt]}",
        "data.sources.hub={path: org/name, options: {data_files: prompts.jsonl}}",
    )
    assert config["data"]["sources"]["train"]["path"] == f"{project}/train.jsonl"
    assert config["eval"]["sources"]["held"]["path"] == f"{here}/held.jsonl"
    assert config["reward"]["functions"]["a"]["fn"] == f"{project}/mine.py:a"
    assert config["reward"]["functions"]["b"]["kwargs"] == {"lists": [f"{here}/words.txt", "other.txt"]}
    assert config["train"]["dir"] == "out/runs", (
        "a resume replaces it, and a copy of the file begins runs where it is used"
    )
    assert config["rollout"]["weights_dir"] == f"{here}/weights"
    assert config["model"]["path"] == f"{here}/model"
    kept = (config["model"]["tokenizer"], config["model"]["chat_template"], config["checkpoint"]["on_signal"])
    assert kept == ("bytes", "${oc.env:MODEL}", "now")
    assert config["reward"]["functions"]["a"]["post_process"] == "math:sqrt"
    assert config["reward"]["functions"]["b"]["fn"] == "count_letter"
    hub = config["data"]["sources"]["hub"]
    assert (hub["path"], hub["options"]) == ("org/name", {"data_files": "prompts.jsonl"})
