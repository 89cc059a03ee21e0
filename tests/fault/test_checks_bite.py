"""Each check of the contracts is weakened in turn, and a test fails each time: tests/weakened/weakened.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.fault, pytest.mark.timeout(560)]

ROOT = Path(__file__).parent.parent.parent
MODULES = (
    "rlcore/errors/checks/data.py",
    "rlcore/errors/checks/interfaces.py",
    *(f"rlcore/plan/{name}.py" for name in ("requests", "pools", "components", "schedule", "ranks")),
    *(f"rlcore/plugins/{name}.py" for name in ("hooks", "load")),
)
TESTS = (
    "plan/test_plan.py",
    "plan/test_plan_offers.py",
    "plan/test_plan_ranks.py",
    "plan/test_plan_refusals.py",
    "plugins/test_plugins.py",
    "plan/test_interfaces.py",
    "plan/test_contract_classes.py",
    "plan/test_contract_data.py",
    "plan/test_shared_pools.py",
    "plan/test_stated_resources.py",
    "plan/test_shared_devices.py",
    "plan/test_plan_pools.py",
    "train/test_schedule.py",
    "train/test_ppo.py",
    "algo/test_algo_greedy.py",
)
UNREACHABLE = ("if spec is None", "if spec.loader is None", "not a Python f")
"""A .py file always has a loader: these are for the type checker. Names of checks are cut."""


def test_no_check_of_the_contracts_can_be_taken_out_unnoticed() -> None:
    weaken = [part for module in MODULES for part in ("--weaken", module)]
    tests = [f"tests/{name}" for name in TESTS]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "weakened", "-p", "no:cacheprovider", *weaken, *tests]
    path = os.pathsep.join((str(ROOT / "tests" / "weakened"), os.environ.get("PYTHONPATH", "")))
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=550
    )
    lines = done.stdout.splitlines()
    assert any(" checks, " in line for line in lines), done.stdout[-2000:] + done.stderr[-2000:]
    free = [line for line in lines if line.startswith("FREE") and not any(text in line for text in UNREACHABLE)]
    assert free == []
    assert not any(line.startswith("FAILED") for line in lines), done.stdout[-2000:]
