"""Errors about names that no enabled plugin offers: they name the installed plugins that offer them, or may."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpu_machines import SETTINGS as GPU_SETTINGS
from gpu_machines import machine

from rlcore.errors import RlcoreError
from rlcore.plan import Facts, make_plan
from rlcore.plan.catalog import remedy
from rlcore.plugins import configure, load
from rlcore.testing.null import SETTINGS
from rlcore.testing.packages import importable, write_package

NAMING = (
    "reward.functions.letters.fn={}",
    "reward.functions.letters.post_process={}",
    "reward.manager={}",
    "rollout.agent={}",
    "critic.engine={}",
    "algo.advantage={}",
    "algo.policy_loss={}",
    "data.order={}",
    "track.to=[{}]",
    "cluster.backend={}",
    "rollout.backend={}",
)
"""Settings that name an offer."""


@pytest.fixture
def acme(tmp_path: Path) -> Iterator[str]:
    """A plugin that is installed and cannot be imported."""
    with importable(tmp_path / "site") as site:
        yield write_package(site, "acme", "raise RuntimeError('imported')")


def refused(*overrides: str) -> str:
    hooks, loaded = configure([], [*SETTINGS, *overrides], ["null"])
    with pytest.raises(RlcoreError) as caught:
        make_plan(loaded, hooks, Facts(cpus=2))
    line = str(caught.value)
    assert "\n" not in line
    return line


@pytest.mark.parametrize("setting", NAMING)
def test_a_plugin_that_is_not_enabled_and_may_have_the_offer_is_named_and_not_imported(acme: str, setting: str) -> None:
    line = refused(setting.format("acme_own"))
    named = "; installed but not enabled: plugin 'acme' (acme 1.0); what offers it is enabled with `--plugin acme`"
    assert line.endswith(named), line
    assert acme not in sys.modules


def test_of_many_plugins_that_may_have_the_offer_some_are_named(acme: str, tmp_path: Path) -> None:
    for number in range(5):
        write_package(tmp_path / "site", f"other_{number}", "")
    line = refused("rollout.agent=acme_own")
    assert line.count("(other-") == 3
    assert line.endswith(" and 2 more; what offers it is enabled with `--plugin NAME`")


def test_an_offer_that_the_catalogue_knows_is_named_with_its_plugin_and_no_other(acme: str) -> None:
    line = refused("reward.functions.letters.fn=environment")
    assert "--plugin agent_loop reward.functions.letters.fn=environment`" in line
    assert "acme" not in line
    line = refused("reward.functions.letters.fn=lost")
    assert "acme" in line
    assert "agent_loop" not in line, "its offers are known, and this is none of them"


@pytest.mark.parametrize("plugin", ["null", "agent_loop"])
def test_the_reward_functions_of_plugins_of_this_repository_are_known(plugin: str) -> None:
    names = [offer.value.name for offer in load([plugin]).reward_functions() if offer.provider.plugin == plugin]
    assert names
    for name in names:
        assert f"--plugin {plugin} " in remedy("reward.functions.x.fn", name, "reward.functions")


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_backend_for_gpus_is_not_taken_if_its_plugin_is_left_out(tmp_path: Path, *, elsewhere: bool) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("plugins: {vllm: {}}")
    for overrides, backend in (
        ((), "vllm"),
        (("plugins.vllm=false",), "hf"),
        (("plugins.vllm=false", "plugins.vllm={}"), "vllm"),
    ):
        found = configure([file], [*GPU_SETTINGS, *overrides], machine=machine(2), elsewhere=elsewhere)[1].config
        assert (found.rollout.backend, "vllm" in found.plugins) == (backend, backend == "vllm"), overrides
