"""Each check of the contracts is weakened in turn, and a test fails each time: tests/weakened/weakened.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.fault, pytest.mark.timeout(560)]

ROOT = Path(__file__).parent.parent.parent
PLAN_MODULES = (
    *("requests", "components", "distillation", "reward_functions", "planner", "sources"),
    *("pools", "schedule", "data_parallel", "mesh", "clusters", "weight_sync", "colocation", "prefixes"),
)
PLANS = (
    "plan/test_cluster_offers.py",
    "plan/test_contract_classes.py",
    "plan/test_contract_data.py",
    "plan/test_contract_exits.py",
    "plan/test_device_defaults.py",
    "plan/test_layout.py",
    "plan/test_plan.py",
    "plan/test_plan_arguments.py",
    "plan/test_plan_attention.py",
    "plan/test_plan_context.py",
    "plan/test_plan_distillation.py",
    "plan/test_plan_function_scores.py",
    "plan/test_plan_ipc.py",
    "plan/test_plan_memory.py",
    "plan/test_plan_mesh.py",
    "plan/test_plan_offers.py",
    "plan/test_plan_pools.py",
    "plan/test_plan_prompt_order.py",
    "plan/test_plan_ranks.py",
    "plan/test_plan_reference.py",
    "plan/test_plan_refusals.py",
    "plan/test_plan_top_entropy.py",
    "plan/test_plan_trackers.py",
    "plan/test_shared_devices.py",
    "plan/test_shared_pools.py",
    "plan/test_plan_weights.py",
    "plan/test_plan_windows.py",
    "plan/test_stated_resources.py",
    "plan/test_weight_sync_of_plans.py",
    "reward/test_reward_plan.py",
    "train/test_new_weights.py",
    "train/test_schedule.py",
    "train/test_ppo.py",
    "algo/test_algo_greedy.py",
)
GROUPS = {
    "what plugins offer": (
        (
            *(f"rlcore/errors/checks/{name}.py" for name in ("data", "interfaces", "targets")),
            *(f"rlcore/plugins/{name}.py" for name in ("hook_calls", "enabled", "discover")),
            *(
                f"rlcore/contracts/{name}.py"
                for name in ("offers", "requests", "components", "clusters", "named_classes")
            ),
        ),
        (
            "contracts/test_named_classes.py",
            "plan/test_cluster_offers.py",
            "plan/test_contract_classes.py",
            "plan/test_contract_data.py",
            "plan/test_interfaces.py",
            "plan/test_plan_refusals.py",
            "plan/test_plan_top_entropy.py",
            "plan/test_stated_resources.py",
            "plugins/test_plugins.py",
            "plugins/test_damaged_metadata.py",
            "plugins/test_plugins_check.py",
            "ground/test_listed.py",
            "ground/test_targets.py",
        ),
    ),
    "what is planned": (tuple(f"rlcore/plan/{name}.py" for name in PLAN_MODULES), PLANS),
    "what algorithms return": (
        ("rlcore/algo/probe.py", "rlcore/algo/torch_state.py"),
        ("algo/test_probe.py", "algo/test_probe_inputs.py"),
    ),
    "what ends the process": (("rlcore/cli/endings.py",), ("cli/test_endings.py",)),
    "what arrives during a run": (
        (
            *("rlcore/errors/checks/arrays.py", "rlcore/errors/checks/results.py"),
            *("rlcore/runtime/checked_components.py", "rlcore/runtime/lane_settings.py"),
        ),
        (
            "runtime/test_lane_settings.py",
            "runtime/test_checked_components.py",
            "train/test_arrival.py",
            "train/test_arrival_values.py",
            "train/test_arrival_workers.py",
            "train/test_arrival_runs.py",
        ),
    ),
}
UNREACHABLE = ("if spec is None", "if spec.loader is None", "not a Python f", "class stays what it is")
"""A .py file always has a loader, and a checked component hands every attribute on: these are for the type checker.
Names of checks are cut."""


@pytest.mark.parametrize("group", GROUPS)
def test_no_check_of_the_contracts_can_be_taken_out_unnoticed(group: str) -> None:
    modules, files = GROUPS[group]
    weaken = [part for module in modules for part in ("--weaken", module)]
    weaken += [part for text in UNREACHABLE for part in ("--unreachable", text)]
    tests = [f"tests/{name}" for name in files]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "weakened", "-p", "no:cacheprovider", *weaken, *tests]
    command += ["-m", "not fault and not real and not gpu and not browser"]
    path = os.pathsep.join((str(ROOT / "tests" / "weakened"), os.environ.get("PYTHONPATH", "")))
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=550
    )
    lines = done.stdout.splitlines()
    assert any(" checks, " in line for line in lines), done.stdout[-2000:] + done.stderr[-2000:]
    assert not any(line.startswith("FREE") for line in lines), [line for line in lines if line.startswith("FREE")]
    assert not any(line.startswith("FAILED") for line in lines), done.stdout[-2000:]
