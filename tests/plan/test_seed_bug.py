"""The bug this project exists to make impossible (verl #4068), replayed against the production planner.

There, an entry point chose the reward model's worker class by one predicate over the config, the reward loop assumed
another class by a second predicate, and the run died minutes later in a remote process because the class that had been
started lacked a method. Here a plugin offers a worker of another interface under the very backend name in use, and a
subclass of the right class for a sibling role; neither may change what is planned, and asking for the wrong one is
refused before anything starts.
"""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlcore.errors import PlanError
from rlcore.plan import RunPlan, plan_to_json
from rlcore.plugins.planning import plan_run
from rlcore.testing import write_prompts
from rlcore.testing.null import SETTINGS
from rlcore.testing.packages import importable, write_package

REPLICAS = """
    from dataclasses import dataclass

    from rlcore.contracts.hooks import hookimpl
    from rlcore.contracts.offers import *; from rlcore.contracts.components import *
    from rlcore.config.providers import *
    from rlcore.contracts.reward_manager import RewardManager
    from rlcore.contracts.rollout import RolloutWorker
    from rlcore.testing.null import NullActor, NullRollout
    from rlcore.contracts.workers import Worker


    class RewardReplica(Worker):
        '''A server; the reward manager asks for its address.'''

        def address(self): ...


    class NullReplica(RewardReplica):
        def setup(self): ...


    class Scorer(Worker):
        '''The sibling: scores, and has no address.'''

        def score(self): ...


    class NullScorer(Scorer):
        def setup(self): ...


    class ScoringReplica(NullReplica, Scorer):
        '''A subclass of the right class, made for the sibling's role.'''

        def score(self): ...


    class SneakyRollout(NullRollout, Scorer):
        '''A subclass of the rollout in use, offered for another interface.'''


    REPLICA = Role("reward_replica", RewardReplica)


    @hookimpl
    def rlcore_reward_managers():
        def requests(config, section):
            return [WorkerRequest(REPLICA, config.reward.functions["letters"].kwargs["backend"])]

        return [Component("served", lambda context: None, requests, uses_reward_functions=True)]


    @hookimpl
    def rlcore_worker_classes():
        offers = [WorkerClass(RewardReplica, "null", NullReplica)]
        return [*offers, {more}]
"""
MORE = (
    'WorkerClass(Scorer, "null", NullScorer), WorkerClass(Scorer, "engine", ScoringReplica), '
    'WorkerClass(Scorer, "hf", SneakyRollout)'
)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Path]:
    """A directory of packages that are installed for the test."""
    with importable(tmp_path / "site") as place:
        yield place


def write_plugin(site: Path, name: str, *, extra: bool) -> None:
    """The reward plugin, with or without the offers that must not matter."""
    text = REPLICAS.replace("{more}", MORE if extra else "")
    write_package(site, name, text)


def served(name: str, backend: str) -> RunPlan:
    """The plan of a run whose reward manager wants replicas of that backend."""
    settings = [*SETTINGS, "reward.manager=served", f"reward.functions.letters.kwargs.backend='{backend}'"]
    return plan_run([], settings, ["null", name])


def test_offers_for_other_interfaces_change_nothing(site: Path) -> None:
    write_plugin(site, "seed_plain", extra=False)
    write_plugin(site, "seed_extra", extra=True)
    plain, extra = (plan_to_json(served(name, "null")) for name in ("seed_plain", "seed_extra"))
    for shown in (plain, extra):
        shown.pop("notes")
        shown.pop("config")
    same = json.dumps(plain, sort_keys=True).replace("seed_plain", "P").replace("seed-plain", "P")
    assert json.dumps(extra, sort_keys=True).replace("seed_extra", "P").replace("seed-extra", "P") == same


def test_offers_that_were_not_requested_are_listed_as_unused(site: Path) -> None:
    write_plugin(site, "seed_extra", extra=True)
    unused = [note for note in served("seed_extra", "null").notes if note.startswith("unused")]
    assert len([note for note in unused if "plugin 'seed_extra'" in note]) == 3
    assert any("NullScorer for (Scorer, null) of plugin 'seed_extra' (seed-extra 1.0)" in note for note in unused)


def test_a_subclass_made_for_a_sibling_role_is_never_a_candidate(site: Path) -> None:
    write_plugin(site, "seed_extra", extra=True)
    threads = threading.active_count()
    with pytest.raises(PlanError) as caught:
        served("seed_extra", "engine")
    line = str(caught.value)
    assert "role 'reward_replica' (asked by reward 'served' of plugin 'seed_extra' (seed-extra 1.0))" in line
    assert "needs a RewardReplica for backend 'engine': none is offered" in line
    assert "offers backend 'engine' for Scorer, which is another interface" in line
    assert threading.active_count() == threads


def test_the_core_refuses_a_backend_that_a_plugin_offers_for_another_interface(site: Path) -> None:
    write_plugin(site, "seed_extra", extra=True)
    with pytest.raises(PlanError) as caught:
        plan_run(
            [],
            [*SETTINGS, "rollout.backend=engine"],
            ["null", "seed_extra"],
        )
    assert "role 'rollout' (asked by core) needs a RolloutWorker for backend 'engine'" in str(caught.value)
    assert "plugin 'seed_extra' (seed-extra 1.0) offers backend 'engine' for Scorer" in str(caught.value)


@pytest.mark.slow
def test_the_command_line_refuses_it_with_exit_code_2_and_starts_nothing(site: Path, tmp_path: Path) -> None:
    write_plugin(site, "seed_extra", extra=True)
    prompts = write_prompts(tmp_path / "prompts.jsonl", 8)
    settings = [
        *SETTINGS,
        "rollout.backend=engine",
        f"data.sources.all.path={prompts}",
        f"train.dir={tmp_path / 'runs'}",
    ]
    command = [sys.executable, "-m", "rlcore", "train", *settings, "--plugin", "null", "--plugin", "seed_extra"]
    path = f"{site}:{Path(__file__).parent.parent.parent}"
    began = time.monotonic()
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={"PYTHONPATH": path, "PATH": ""}, cwd=tmp_path
    )
    assert done.returncode == 2, done.stderr
    assert time.monotonic() - began < 20  # ten times what is promised
    line = done.stderr.strip()
    assert "\n" not in line
    assert "role 'rollout' (asked by core)" in line
    assert "plugin 'seed_extra' (seed-extra 1.0)" in line
    assert not (tmp_path / "runs").exists()
