"""Orders of prompts are offers like any others: named by `data.order`, checked when planning, shown by the plan."""

import json
from pathlib import Path

import pytest

from rlcore.cli import main
from rlcore.errors import ConfigError, PluginError
from rlcore.plan import plan_to_json
from rlcore.plugins.planning import plan_run
from rlcore.testing.null import SETTINGS

PLUGIN = """
from rlcore import PromptOrderOffer, hookimpl
from rlcore.testing import LeastSeen

RLCORE_API = "1"


class Mine(LeastSeen):
    pass


@hookimpl
def rlcore_prompt_orders():
    return [PromptOrderOffer("mine", Mine)]
"""

META = "class Meta(type(LeastSeen)):\n    __signature__ = property(lambda cls: 1 / 0)\n\n\n"


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(PLUGIN)
    return path


def test_the_plan_shows_the_order_with_who_provides_it(plugin: Path, capsys: pytest.CaptureFixture[str]) -> None:
    core = plan_to_json(plan_run([], SETTINGS, ["null"]))["prompt_order"]
    assert (core["name"], core["provided_by"].startswith("plugin 'core'")) == ("seeded", True)
    plan = plan_run([], [*SETTINGS, "data.order=mine"], ["null", str(plugin)])
    assert plan_to_json(plan)["prompt_order"] == {"name": "mine", "provided_by": f"plugin 'mine' ({plugin} API 1)"}
    assert main(["plan", *SETTINGS, "data.order=mine", "--plugin", "null", "--plugin", str(plugin)]) == 0
    assert "prompt order" in capsys.readouterr().out


def test_a_name_that_is_not_offered_is_refused_with_the_nearest(plugin: Path) -> None:
    with pytest.raises(ConfigError, match=r"^data\.order: no plugin offers 'seedet'; did you mean 'seeded'\?"):
        plan_run([], [*SETTINGS, "data.order=seedet"], ["null"])


def test_two_plugins_that_offer_one_name_are_refused(plugin: Path) -> None:
    other = plugin.with_name("other.py")
    other.write_text(PLUGIN)
    with pytest.raises(PluginError, match=r"^data\.order=mine: offered twice, by plugin 'mine' .* and plugin 'other'"):
        plan_run([], [*SETTINGS, "data.order=mine"], ["null", str(plugin), str(other)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("def __init__(self, context, more): pass", "takes"),
        ("next = None", "next"),
        ("async def state(self): pass", "state"),
        ("def next(self, n): pass", "next"),
    ],
)
def test_a_class_that_is_not_an_order_is_refused_by_plan_and_check(
    plugin: Path, capsys: pytest.CaptureFixture[str], line: str, words: str
) -> None:
    plugin.write_text(PLUGIN.replace("    pass", f"    {line}"))
    with pytest.raises(PluginError, match=f"as prompt order 'mine', but .*{words}"):
        plan_run([], [*SETTINGS, "data.order=mine"], ["null", str(plugin)])
    assert main(["plugins", "--check", str(plugin), "--json"]) == 2
    assert "as prompt order 'mine', but" in json.loads(capsys.readouterr().out)[0]["problems"][0]


def test_what_counts_as_solved_has_no_meaning_to_the_cores_order() -> None:
    with pytest.raises(ConfigError, match=r"data\.solved_at"):
        plan_run([], [*SETTINGS, "data.solved_at=0.5"], ["null"])


def test_a_class_that_raises_when_it_is_looked_at_is_named(plugin: Path) -> None:
    plugin.write_text(PLUGIN.replace("class Mine(LeastSeen):", f"{META}class Mine(LeastSeen, metaclass=Meta):"))
    with pytest.raises(PluginError, match=r"^plugin 'mine' .*: looking at .*Mine: ZeroDivisionError"):
        plan_run([], [*SETTINGS, "data.order=mine"], ["null", str(plugin)])
