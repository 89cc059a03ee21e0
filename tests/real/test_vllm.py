"""Rollout replicas on vLLM: run with the Python of .venv-vllm (`make setup-vllm`)."""

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None,
        reason="vllm cannot be imported: `make setup-vllm`, then .venv-vllm/bin/python -m pytest -m real",
    ),
]

ROOT = Path(__file__).parent.parent.parent
EXAMPLE = ROOT / "examples" / "ray_vllm"
DEADLINE_S = 360.0


def run(directory: Path, *overrides: str) -> list[dict[str, float]]:
    """The metrics of three steps of the example."""
    command = [sys.executable, "-m", "rlcore", "train", str(EXAMPLE / "config.yaml"), str(EXAMPLE / "ci_vllm.yaml")]
    done = subprocess.run(
        [*command, f"train.dir={directory}", "train.name=run", *overrides],
        cwd=ROOT,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    lines = (directory / "run" / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "reward/mean" in row]


def engines() -> set[str]:
    """Ids of all processes of vLLM on this machine, which give themselves a title."""
    found = set()
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if each.read_bytes().startswith(b"VLLM::"):
                found.add(each.parent.name)
    return found


@pytest.mark.parametrize("cluster", ["local", "ray"])
def test_three_steps_with_the_weights_of_each_step(cluster: str, tmp_path: Path) -> None:
    before = engines()
    steps = run(tmp_path, f"cluster.backend={cluster}")
    assert len(steps) == 3
    for number, step in enumerate(steps):
        assert 0.0 <= step["reward/mean"] <= 1.0
        assert step["policy/rollout_logprob_diff"] < 1e-3, "vLLM samples from the actor's policy"
        assert step["schedule/staleness_max"] == 0.0
        rows = (tmp_path / "run" / "trajectories" / f"step_{number + 1:06d}.jsonl").read_text().splitlines()
        assert {version for row in rows for _, version in json.loads(row)["versions"]} == {number}
    assert engines() <= before, "the engine's processes end with the run"
