"""Settings that the estimates of a plan advise: layouts with the weight sync that suits them, and only plans that were
accepted."""

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from gpu_machines import planned
from planned_machines import QWEN_32B, settings_of_7b
from planned_machines import planned as printed
from planned_machines import refused as refusal
from refused_plans import VLLM, facts_on

from rlcore.cli import main
from rlcore.errors import PlanError
from rlcore.plan import RunPlan
from rlcore.plan.faster_layouts import WORTH, LayoutSearch
from rlcore.plan.machine_cards import machine_of
from rlcore.plan.machine_plan import MAX_PLANS, Lengths, plan_on, step_layout, step_size
from rlcore.plan.machine_times import estimate_step

Capture = pytest.CaptureFixture[str]
ON = "8x8xH100-80GB"
RANKS = ("actor.data_parallel=64", "actor.sharding=fsdp2")
OF_FOUR = ("rollout.replicas=16", "--plugin", "vllm", "plugins.vllm.tensor_parallel=4")
COLOCATED = (*RANKS, *OF_FOUR, "cluster.layout=colocated")
LONG = ("data.max_prompt_tokens=1024", "rollout.max_tokens=2048", "rollout.samples_per_prompt=16")
RANKS_OF_FOUR = ("actor.data_parallel=4", "actor.sharding=fsdp2", "rollout.replicas=4")
OVER_IPC = (*VLLM, *LONG, *RANKS_OF_FOUR, "cluster.layout=colocated", "rollout.weight_sync=ipc")
IN_TURNS = (*VLLM, *LONG, "plugins.vllm.gpu_memory_frac=0.7")


@pytest.fixture
def of_32b(tmp_path: Path) -> list[str]:
    settings = settings_of_7b(tmp_path)
    (tmp_path / "model" / "config.json").write_text(json.dumps(QWEN_32B))
    return [*settings, "rollout.max_tokens=4096", "rollout.samples_per_prompt=8"]


class Advising:
    """The plan of a run on a machine, with all plans that were made for its advice."""

    def __init__(self, on: str, *overrides: str) -> None:
        self.on, self.overrides = on, overrides
        self.tried: list[tuple[str, ...]] = []
        self.accepted: dict[tuple[str, ...], RunPlan] = {}
        self.plan, self.found = plan_on(self._replan, machine_of(on), Lengths())

    def _replan(self, further: Sequence[str]) -> RunPlan:
        self.tried.append(tuple(further))
        plan = planned(*self.overrides, *further, facts=facts_on(self.on))
        self.accepted[tuple(further)] = plan
        return plan

    def advised(self) -> list[tuple[str, ...]]:
        return [setting.overrides for setting in self.found.settings]


@pytest.mark.slow
def test_a_layout_that_is_faster_only_with_another_weight_sync_is_advised_with_it(
    of_32b: list[str], capsys: Capture
) -> None:
    split = ("actor.data_parallel=32", "rollout.replicas=8", "cluster.layout=split", "rollout.weight_sync=nccl")
    on = printed(capsys, *of_32b, *COLOCATED, "--on", ON)["on"]
    by_hand = printed(capsys, *of_32b, *COLOCATED, *split, "--on", ON)["on"]["step_s"]
    assert by_hand < 0.8 * on["step_s"], "the case is one in which both settings together help"
    found = [setting for setting in on["settings"] if "schedule.max_staleness=1" not in setting["overrides"]]
    assert found[0]["step_s"] <= by_hand
    assert {"cluster.layout=split", "rollout.weight_sync=nccl"} <= set(found[0]["overrides"])
    again = printed(capsys, *of_32b, *COLOCATED, *found[0]["overrides"], "--on", ON)["on"]
    assert again["step_s"] == pytest.approx(found[0]["step_s"])


@pytest.mark.parametrize(("on", "advised"), [("8xH100-80GB", True), ("2x4xH100-80GB", False)])
def test_shared_memory_is_advised_where_weights_go_through_files_on_one_machine(on: str, advised: bool) -> None:
    ranks = ("actor.data_parallel=4", "actor.sharding=fsdp2", "rollout.replicas=4", "actor.dtype=bfloat16")
    found = Advising(on, *VLLM, *LONG, *ranks, "rollout.weight_sync=disk")
    assert (("rollout.weight_sync=shm",) in found.advised()) is advised


@pytest.mark.slow
def test_without_a_setting_that_helps_there_is_a_line_and_no_table(of_32b: list[str], capsys: Capture) -> None:
    best = ("rollout.replicas=8", "cluster.layout=split", "rollout.weight_sync=nccl", "schedule.max_staleness=1")
    settings = (*of_32b, *COLOCATED, "actor.data_parallel=32", *best, "--on", ON)
    assert printed(capsys, *settings)["on"]["settings"] == []
    assert main(["plan", *settings]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert not [line for line in lines if "settings that would help most" in line]
    assert sum("no setting that was tried saves more than 1% of a step" in line for line in lines) == 1


MACHINES = [
    ("8xH100-80GB", (*VLLM, *LONG)),
    ("2x8xA100-80GB", (*VLLM, *LONG)),
    ("4xA100-80GB", (*VLLM, *LONG, "actor.data_parallel=2", "rollout.replicas=2", "rollout.weight_sync=nccl")),
    ("1xH100-80GB", IN_TURNS),
    ("4xH100-80GB", OVER_IPC),
    ("1xH200", ("rollout.backend=hf", *LONG)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("on", "overrides"), MACHINES, ids=[on for on, _ in MACHINES])
def test_what_is_advised_was_planned_with_these_settings_and_few_plans_are_made(
    on: str, overrides: tuple[str, ...], vllm: None
) -> None:
    advising = Advising(on, *overrides)
    assert advising.found.settings
    assert set(advising.advised()) <= set(advising.accepted)
    assert len(advising.tried) == len(set(advising.tried)) <= 2 * MAX_PLANS + 6
    for override in overrides:
        key, _, value = override.partition("=")
        if key == "plugins.vllm.gpu_memory_frac":
            rollouts = [worker.request for plan in advising.accepted.values() for worker in plan.workers]
            shares = {request.device_frac for request in rollouts if request.role.name == "rollout"}
            assert shares == {float(value)}, "all at the share that the run sets"


@pytest.mark.slow
@pytest.mark.parametrize(("on", "overrides"), MACHINES[:3], ids=[on for on, _ in MACHINES[:3]])
def test_no_plan_is_faster_than_the_least_time_of_its_layout_and_slower_layouts_are_not_planned(
    on: str, overrides: tuple[str, ...], vllm: None
) -> None:
    advising, machine = Advising(on, *overrides), machine_of(on)
    sizes = step_size(advising.plan, Lengths()), step_layout(advising.plan, Lengths())
    search, step_s = LayoutSearch(advising.plan, *sizes, machine), advising.found.times.total
    layouts = [layout for stale in (False, True) for layout in search.faster(step_s, stale=stale)]
    fastest = step_s
    for layout in layouts:
        for way in layout.ways:
            with contextlib.suppress(PlanError):
                plan = planned(*overrides, *way, facts=facts_on(on))
                found_s = estimate_step(step_size(plan, Lengths()), step_layout(plan, Lengths()), machine).total
                assert layout.least_s <= found_s * (1 + 1e-9), way
                fastest = min(fastest, found_s)
    assert advising.found.settings[0].step_s <= fastest / (1 - WORTH)
    assert sum(len(setting) > 1 for setting in advising.tried) < len(layouts) - 2


def test_the_opposite_of_what_was_chosen_because_it_does_not_fit_is_not_advised(vllm: None) -> None:
    advising = Advising("1xH100-80GB", *IN_TURNS)
    chosen = next(choice for choice in advising.plan.choices if choice.key == "actor.offload")
    assert chosen.value is True
    assert not chosen.set_by
    without = planned(*IN_TURNS, "actor.offload=false", facts=facts_on("1xH100-80GB"))
    assert not without.config.actor.offload, "it is accepted, with less room than the plan wants to leave"
    assert ("actor.offload=false",) not in advising.tried
    of_user = Advising("1xH100-80GB", *IN_TURNS, "actor.offload=true")
    assert ("actor.offload=false",) in of_user.advised()


def test_rows_that_an_embedded_sampler_has_no_room_for_are_not_advised() -> None:
    embedded = ("rollout.backend=hf", *LONG, "rollout.max_tokens=16384")
    advising = Advising("1xH100-80GB", *embedded)
    assert advising.plan.config.rollout.max_rows < 256
    assert not [setting for setting in advising.tried if "max_rows" in str(setting)]
    assert ("rollout.max_rows=64",) in Advising("1xH100-80GB", *embedded, "rollout.max_rows=32").tried


def test_the_schedule_alone_is_advised_where_the_layout_is_already_the_best(vllm: None) -> None:
    ranks = ("actor.data_parallel=2", "actor.sharding=fsdp2", "rollout.replicas=6", "rollout.weight_sync=nccl")
    advised = Advising("8xH100-80GB", *VLLM, *LONG, *ranks).advised()
    assert ("schedule.max_staleness=1",) in advised
    assert sum("schedule.max_staleness=1" in setting for setting in advised) == 1


@pytest.mark.slow
def test_pools_that_are_too_large_name_the_layout_that_is_accepted_and_only_then(
    of_32b: list[str], capsys: Capture
) -> None:
    joined = ("--plugin", "ray", "cluster.backend=ray", "plugins.ray.address=auto", "--on", ON)
    vllm = ("rollout.backend=vllm",)
    line = refusal(capsys, *of_32b, *RANKS, *OF_FOUR, *vllm, *joined)
    assert "the pools need 128 GPUs ('main' 64, 'rollout' 64), the machine has 64; let roles share a pool" in line
    assert "let roles share a pool (cluster.layout=colocated), or" in line
    plan = printed(capsys, *of_32b, *RANKS, *OF_FOUR, *vllm, *joined, "cluster.layout=colocated")
    assert plan["layout"]["name"] == "colocated"
    assert "(cluster.layout=colocated)" in refusal(capsys, *of_32b, *COLOCATED, *vllm, *joined, "cluster.layout=split")
    for more in ("rollout.replicas=20", "schedule.max_staleness=1"):
        line = refusal(capsys, *of_32b, *RANKS, *OF_FOUR, *vllm, *joined, more)
        assert "the machine has 64; let roles share a pool, or set cluster.device=cpu" in line
