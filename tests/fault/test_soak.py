"""The soak at its shortest: everything together, faults from a seed, and an account of every prompt afterwards."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.fault, pytest.mark.timeout(400)]

SOAK = Path(__file__).parents[2] / "benchmarks" / "soak.py"


def test_a_run_with_everything_in_it_survives_faults_from_a_seed_and_equals_the_undisturbed_one() -> None:
    command = [sys.executable, str(SOAK), "--smoke", "--seed", "9", "--scene", "program"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=350)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["differences"] == 0
    assert sum(found["injected"].values()) == 7
    assert found["statuses"] == {"ok": found["steps"] * 16}
