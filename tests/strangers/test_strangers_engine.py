"""A stranger's engine is planned, shown, refused and started like ours, from public names alone."""

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rlcore
from rlcore.cli import main
from rlcore.errors import ConfigError, PlanError, PluginError, RlcoreError
from rlcore.plan import Facts, RunPlan, make_plan, plan_to_json
from rlcore.plugins import configure, planning
from rlcore.report import metrics
from rlcore.testing import write_prompts
from rlcore.testing.leaks import leaks
from rlcore.testing.null import SETTINGS, NullActor
from rlcore.testing.packages import importable, write_package
from rlcore.testing.suites.rollout import RolloutWorkerSuite
from rlcore.train import train

SOURCE = Path(__file__).with_name("tandem.py")
CHOSEN = ("plugins.tandem={}", "rollout.backend=tandem")
GPUS = "cluster.device=cuda"
WHO = "plugin 'tandem' (tandem 1.0)"
GIB = 2**30
CONTEXT_BYTES = 512 * 2**20


@pytest.fixture(autouse=True)
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory in which the stranger's package is installed, for child processes too."""
    with importable(tmp_path / "site") as place, leaks():
        write_package(place, "tandem", SOURCE.read_text("utf-8"))
        monkeypatch.syspath_prepend(str(place))
        yield place


def planned(*overrides: str, gpus: int = 8) -> RunPlan:
    hooks, loaded = configure([], [*SETTINGS, *CHOSEN, *overrides], ["null", "tandem"])
    return make_plan(loaded, hooks, Facts(cpus=8, gpus=gpus, gpu_memory_bytes=80 * GIB))


def test_it_imports_public_names_only() -> None:
    nodes = list(ast.walk(ast.parse(SOURCE.read_text("utf-8"))))
    ours = [node for node in nodes if isinstance(node, ast.ImportFrom) and str(node.module).startswith("rlcore")]
    assert [node.module for node in ours] == ["rlcore"]
    assert {alias.name for alias in ours[0].names} <= set(rlcore.__all__)
    assert not [node for node in nodes if isinstance(node, ast.Import) and "rlcore" in ast.unparse(node)]


def test_it_is_planned_with_two_devices_per_replica_memory_and_a_pool() -> None:
    plan = planned(GPUS, "rollout.replicas=3")
    request = next(worker.request for worker in plan.workers if worker.request.role.name == "rollout")
    assert (request.gpus, request.replicas, request.pool, request.device_frac) == (2.0, 3, "tandem", 0.6)
    assert (request.isolated, request.cpus) == (True, 2.0)
    assert {pool.name: (pool.gpus, pool.provided_by) for pool in plan.pools} == {
        "tandem": ((1, 2, 3, 4, 5, 6), WHO),
        "main": ((0,), "plugin 'core' (rlcore 0.1.0)"),
    }
    assert plan.weights_kind == "directory"
    half = planned(GPUS, "plugins.tandem.memory_frac=0.5").device_bytes["tandem"]
    assert set(half.values()) == {40 * GIB + CONTEXT_BYTES}, "half of the device, and the context of its process"


def test_it_sleeps_while_the_actor_trains_on_its_devices() -> None:
    shared = ("cluster.train_pool=train", "cluster.pools.train.colocates=[tandem]")
    assert planned(GPUS, *shared).colocated_roles == ("rollout",)


def test_it_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    worker = plan_to_json(planned(GPUS))["workers"]["rollout"]
    assert (worker["gpus"], worker["pool"], worker["device_frac"]) == (2.0, "tandem", 0.6)
    assert main(["plan", *SETTINGS, *CHOSEN, "rollout.replicas=2", "--plugin", "null", "--plugin", "tandem"]) == 0
    text = capsys.readouterr().out
    assert "Tandem" in text
    assert main(["plugins", "--plugin", "tandem", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert any("tandem" in offer and "RolloutWorker" in offer for offer in rows["tandem"]["offers"])


@pytest.mark.parametrize(
    ("error", "overrides", "message"),
    [
        (
            PlanError,
            ("rollout.replicas=4", "cluster.layout=split"),
            "the pools need 9 GPUs ('main' 1, 'tandem' 8), the machine has 8",
        ),
        (PlanError, ("plugins.tandem.broken=too many",), "the pools need 65 GPUs ('main' 1, 'tandem' 64), the machine"),
        (
            PlanError,
            ("cluster.pools.tandem.gpus_per_node=1",),
            "pool 'tandem' of config (cluster.pools) is too small: role 'rollout' of core needs 2 GPUs",
        ),
        (PluginError, ("plugins.tandem.broken=raises",), f"{WHO}: complete() of tandem.Tandem for role 'rollout'"),
        (PluginError, ("plugins.tandem.broken=half",), "gpus is 1.5; needs a share of one device, or a whole number"),
        (ConfigError, ("plugins.tandem.broken=refuses",), "plugins.tandem.broken: found 'refuses'; needs another"),
        (
            PlanError,
            ("plugins.tandem.broken=contradicts", "rollout.pool=mine"),
            "role 'rollout' of core asks for pool 'mine', but tandem.Tandem of plugin 'tandem' (tandem 1.0) states "
            "pool 'elsewhere'; needs one pool",
        ),
        (PlanError, ("rollout.weight_sync=tcp",), "Tandem of plugin 'tandem' (tandem 1.0) does not take weights that"),
        (ConfigError, ("plugins.tandem.memory_frac=1.5",), "plugins.tandem.memory_frac: found 1.5"),
        (ConfigError, ("rollout.tandem.memory_frac=0.5",), "rollout.tandem: unknown key"),
    ],
)
def test_it_is_refused_like_ours_in_one_line(
    error: type[RlcoreError], overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises(error) as caught:
        planned(GPUS, *overrides)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_being_named_it_is_not_offered() -> None:
    hooks, loaded = configure([], [*SETTINGS, "rollout.backend=tandem"], ["null"])
    with pytest.raises(PlanError, match=r"needs a RolloutWorker for backend 'tandem': none is offered"):
        make_plan(loaded, hooks, Facts(cpus=8))


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_it_is_started_on_its_devices_and_samples_with_the_weights_of_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """The GPUs are those of a plan: neither the actor `null` nor the engine computes on them. Both share them."""
    monkeypatch.setattr(
        planning, "gather_facts", lambda config, machine: Facts(cpus=2, gpus=4 if device == "cuda" else 0)
    )
    config: dict[str, Any] = {
        "model": {"path": "", "tokenizer": "bytes"},
        "data": {"sources": {"all": {"path": str(write_prompts(tmp_path / "prompts.jsonl", 8))}}},
        "rollout": {"replicas": 2, "samples_per_prompt": 4, "max_tokens": 8},
        "reward": {"functions": {"letters": {"fn": "count_letter", "children": 1}}},
        "actor": {"backend": "null", "lr": 0.1},
        "train": {"prompts_per_step": 2, "max_steps": 2, "dir": str(tmp_path), "name": "run"},
        "cluster": {"device": device, "train_pool": "train", "pools": {"train": {"colocates": ["tandem"]}}},
        "checkpoint": {"every_steps": 0, "at_end": False},
        "plugins": {"null": {}, "tandem": {}},
    }
    run_dir = train(config).run_dir
    steps = [row for row in metrics.read(run_dir) if "reward/mean" in row]
    assert len(steps) == 2
    assert all(step["actor/grad_norm"] > 0.0 for step in steps)
    for number in (1, 2):
        rows = metrics.read_trajectories(run_dir, number)
        assert {version for row in rows for _, version in row["versions"]} == {number - 1}
    visible = {"cpu": ["no device", "no device"], "cuda": ["0,1", "2,3"]}[device]
    for replica, devices in enumerate(visible):
        notes = [json.loads(line) for line in (run_dir / f"tandem_{replica}.jsonl").read_text().splitlines()]
        assert notes[0].startswith(f"set up on {devices} as {device}")
        assert notes[0].endswith(", 2 axles"), "what `complete` stated, in another process"
        assert {"loaded 1: trained", "asleep", "awake"} <= set(notes)


class TestTandem(RolloutWorkerSuite):
    target = f"{SOURCE}:Tandem"
    actor = NullActor
    sleeps = True
    truncates = False
