"""Trackers are offers like any others: named by `track.to`, checked when planning, shown by the plan."""

import json
import logging
from pathlib import Path

import pytest

from rlcore.cli import main
from rlcore.errors import ConfigError, PluginError
from rlcore.plan import RunPlan, plan_to_json
from rlcore.plugins.planning import plan_run
from rlcore.testing.null import SETTINGS

PLUGIN = """
import csv, sys
from dataclasses import dataclass
from rlcore import ConfigSection, Tracker, TrackerOffer, hookimpl

RLCORE_API = "1"


@dataclass(frozen=True)
class Section:
    fails_at: str = ""
    \"\"\"The call that fails.\"\"\"


class Mine(Tracker):
    def start(self, configuration):
        self.note("start", configuration["train.max_steps"])

    def note(self, *values):
        if self.context.settings(Section).fails_at == values[0]:
            raise RuntimeError(f"{values[0]} fails")
        with (self.context.run_dir / "mine.csv").open("a") as file:
            print(*values, sep=",", file=file)

    def log(self, step, metrics):
        self.note("log", step, metrics["reward/mean"])

    def log_samples(self, step, samples):
        self.note("samples", step, len(samples))

    def close(self):
        self.note("close")


@hookimpl
def rlcore_config_sections():
    return [ConfigSection("mine", Section)]


@hookimpl
def rlcore_trackers():
    return [TrackerOffer(NAME, Mine)]
"""


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(PLUGIN.replace("NAME", '"mine"'))
    return path


def planned(path: Path, *settings: str) -> RunPlan:
    return plan_run([], [*SETTINGS, *settings], ["null", str(path)])


def trained(path: Path, *settings: str) -> int:
    run_dir, steps = path.parent / "run", ("train.max_steps=2", "train.log_completions_every=1")
    plugins = ["--plugin", "null", "--plugin", str(path)]
    return main(["train", *SETTINGS, *steps, *settings, *plugins, f"train.dir={run_dir}"])


def test_trackers_are_planned_in_their_order_with_who_offers_them(plugin: Path) -> None:
    plan = planned(plugin, "track.to=[mine, tensorboard, mine]", "plugins.mine.fails_at=never")
    assert [tracker.offer.name for tracker in plan.trackers] == ["mine", "tensorboard"]
    assert plan.trackers[0].section.fails_at == "never"
    assert plan_to_json(plan)["trackers"]["mine"] == {"provided_by": f"plugin 'mine' ({plugin} API 1)"}
    assert plan_to_json(planned(plugin, "track.to=mine"))["trackers"].keys() == {"mine"}


def test_a_name_that_is_not_offered_is_refused_with_the_nearest(plugin: Path) -> None:
    with pytest.raises(ConfigError, match=r"^track\.to: no plugin offers 'tensorbord'; did you mean 'tensorboard'\?"):
        planned(plugin, "track.to=[mine, tensorbord]")


def test_a_name_that_is_offered_twice_is_refused(plugin: Path) -> None:
    plugin.write_text(PLUGIN.replace("NAME", '"wandb"'))
    with pytest.raises(PluginError, match=r"^track\.to=wandb: offered twice, by plugin 'core' .* and plugin 'mine'"):
        planned(plugin, "track.to=wandb")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("def __init__(self, context, address): pass", "takes"),
        ("log = None", "log"),
        ("async def close(self): pass", "close"),
    ],
)
def test_a_class_that_is_not_a_tracker_is_refused_by_plan_and_check(
    plugin: Path, capsys: pytest.CaptureFixture[str], line: str, words: str
) -> None:
    plugin.write_text(PLUGIN.replace("NAME", '"mine"') + f"\n\nclass Mine(Mine):\n    {line}\n")
    with pytest.raises(PluginError, match=f"as tracker 'mine', but .*{words}"):
        planned(plugin, "track.to=mine")
    assert main(["plugins", "--check", str(plugin), "--json"]) == 2
    assert "as tracker 'mine', but" in json.loads(capsys.readouterr().out)[0]["problems"][0]


def test_a_plugin_whose_tracker_is_not_named_is_unused(plugin: Path) -> None:
    assert main(["plan", *SETTINGS, "--plugin", "null", "--plugin", str(plugin)]) == 2


@pytest.mark.slow
def test_a_tracker_of_a_plugin_gets_a_whole_run(plugin: Path) -> None:
    assert trained(plugin, "track.to=mine") == 0
    [table] = plugin.parent.glob("run/**/mine.csv")
    lines = [line.split(",") for line in table.read_text().splitlines()]
    assert [line[0] for line in lines] == ["start", "log", "samples", "log", "samples", "close"]
    assert (lines[0][1], lines[1][1], lines[3][1]) == ("2", "1", "2")


@pytest.mark.slow
@pytest.mark.parametrize("call", ["log", "samples", "close"])
def test_a_tracker_that_fails_ends_no_run(
    plugin: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # those of pytest would show the warning instead
    assert trained(plugin, "track.to=mine", f"plugins.mine.fails_at={call}") == 0
    shown = capsys.readouterr()
    assert f"RuntimeError: {call} fails" in " ".join((shown.out + shown.err).split())


def test_a_tracker_that_does_not_start_refuses_the_run(plugin: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert trained(plugin, "track.to=mine", "plugins.mine.fails_at=start") == 2
    assert "did not start: RuntimeError: start fails" in " ".join(capsys.readouterr().err.split())
