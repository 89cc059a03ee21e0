"""The recipes of examples/cluster: what they ask a scheduler for is what the plan needs, and signals reach the run."""

import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlcore.cli import main
from rlcore.plugins.planning import plan_run
from rlcore.testing.tiny import write_tiny_model

CLUSTER = Path(__file__).parent.parent.parent / "examples" / "cluster"
CONFIG = CLUSTER / "config.yaml"
REQUIREMENTS = CLUSTER.parent.parent / "requirements" / "cpu.txt"

FAKE = """#!/usr/bin/env bash
echo "$(basename "$0") $*" >> "$CALLS"
"""
SRUN = (
    FAKE
    + """
while [[ "$1" == --* ]]; do shift; done
exec "$@"
"""
)
HOSTNAME = FAKE + "echo 10.0.0.1 172.17.0.1\n"
SCONTROL = FAKE + "printf 'node1\\nnode2\\nnode3\\n'\n"
RAY = (
    FAKE
    + """
if [ "$1" = status ]; then exit 0; fi
if [ -n "${HEAD_FAILS:-}" ]; then exit 3; fi
while :; do sleep 0.05; done
"""
)
RLCORE = (
    FAKE
    + """
echo "token of ${#RAY_AUTH_TOKEN} characters, mode $RAY_AUTH_MODE" >> "$CALLS"
trap 'echo "rlcore: SIGTERM" >> "$CALLS"; sleep 0.3; exit 143' TERM
if [ -n "${TRAINS:-}" ]; then touch training; while :; do sleep 0.05; done; fi
while [ "$(grep -c '^ray start' "$CALLS")" -lt 3 ]; do sleep 0.05; done
exit 7
"""
)
PROGRAMS = {"srun": SRUN, "hostname": HOSTNAME, "scontrol": SCONTROL, "ray": RAY, "rlcore": RLCORE}


@pytest.fixture
def batch(tmp_path: Path) -> Any:
    """Starts slurm.sbatch in `tmp_path`, where each program that it calls is one that notes its arguments."""
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name, text in PROGRAMS.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)

    def start(**environment: str) -> subprocess.Popen[bytes]:
        slurm = {"CALLS": str(tmp_path / "calls"), "SLURM_JOB_ID": "1234567", "SLURM_JOB_NODELIST": "node[1-3]"}
        command = ["bash", str(CLUSTER / "slurm.sbatch"), "config.yaml", "sums", "train.max_steps=3"]
        return subprocess.Popen(command, cwd=tmp_path, env=os.environ | slurm | environment)

    return start


def calls(directory: Path) -> list[str]:
    return (directory / "calls").read_text().splitlines()


def test_a_slurm_job_starts_one_head_a_worker_on_each_other_node_and_ends_as_the_training_does(
    batch: Any, tmp_path: Path
) -> None:
    assert batch().wait(30) == 7
    lines = calls(tmp_path)
    assert "24567" not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    starts = sorted(line for line in lines if line.startswith("srun") and "ray start" in line)
    assert [re.findall(r"--nodelist=(\w+)", line)[0] for line in starts] == ["node1", "node2", "node3"]
    assert "--head --node-ip-address=10.0.0.1 --port=24567" in starts[0]
    assert all("ray start --address=10.0.0.1:24567 --block" in line for line in starts[1:])
    trained = next(line for line in lines if line.startswith("rlcore"))
    assert trained == "rlcore train config.yaml train.name=sums plugins.ray.address=10.0.0.1:24567 train.max_steps=3"
    assert "token of 64 characters, mode token" in lines


STARTS = {"": "", "runs/sums": " --resume --from-start", "runs/sums/checkpoints/step_20": " --resume"}
"""The options with which a job continues a run, by what is there; a run may have ended before its first checkpoint."""


@pytest.mark.parametrize("found", list(STARTS)[1:])
def test_a_slurm_job_continues_a_run_that_is_there(batch: Any, tmp_path: Path, found: str) -> None:
    (tmp_path / found).mkdir(parents=True)
    assert batch().wait(30) == 7
    (trained,) = [line for line in calls(tmp_path) if line.startswith("rlcore")]
    assert trained.endswith(f" train.max_steps=3{STARTS[found]}")


@pytest.mark.slow
def test_the_signal_before_the_end_of_a_slurm_job_reaches_the_training_which_is_waited_for(
    batch: Any, tmp_path: Path
) -> None:
    job = batch(TRAINS="1")
    deadline = time.monotonic() + 30
    while not (tmp_path / "training").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    job.send_signal(signal.SIGTERM)  # as `--signal=B:TERM@300` does: to the batch script alone
    assert job.wait(30) == 143
    assert "rlcore: SIGTERM" in calls(tmp_path)  # commands of other nodes may be noted later


@pytest.mark.slow
def test_a_slurm_job_whose_head_fails_ends(batch: Any, tmp_path: Path) -> None:
    (tmp_path / ".venv" / "bin" / "ray").write_text(RAY.replace("= status ]; then exit 0", "= status ]; then exit 1"))
    assert batch(HEAD_FAILS="1").wait(30) == 1
    assert not any(line.startswith("rlcore") for line in calls(tmp_path))


@pytest.mark.slow
def test_the_rayjob_asks_for_the_nodes_and_devices_of_the_plan() -> None:
    job = yaml.safe_load((CLUSTER / "rayjob.yaml").read_text())["spec"]
    cluster = job["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for pod in (group["template"]["spec"] for group in groups):
        (container,) = pod["containers"]
        mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounted["work"] == container["workingDir"] == "/work"
        assert {volume["name"] for volume in pod["volumes"]} == set(mounted)
    (workers,) = cluster["workerGroupSpecs"]
    (container,) = workers["template"]["spec"]["containers"]
    pools = plan_run([CONFIG], []).pools
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"] == len(pools)
    assert {pool.gpus_per_node for pool in pools} == {int(container["resources"]["limits"]["nvidia.com/gpu"])}
    assert f"ray=={cluster['rayVersion']}" in REQUIREMENTS.read_text()
    assert cluster["authOptions"] == {"mode": "token"}


@pytest.mark.parametrize("found", STARTS)
def test_the_entry_point_of_the_rayjob_begins_or_continues_the_run(found: str, tmp_path: Path) -> None:
    entry = yaml.safe_load((CLUSTER / "rayjob.yaml").read_text())["spec"]["entrypoint"]
    (tmp_path / "rlcore").write_text(FAKE)
    (tmp_path / "rlcore").chmod(0o755)
    (tmp_path / found).mkdir(parents=True, exist_ok=True)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "CALLS": str(tmp_path / "calls")}
    subprocess.run(shlex.split(entry), cwd=tmp_path, env=environment, check=True, timeout=30)
    expected = f"rlcore train config.yaml train.name=sums plugins.ray.address=auto{STARTS[found]}"
    assert calls(tmp_path) == [expected]


@pytest.mark.slow
def test_the_configuration_is_planned_for_the_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_tiny_model(tmp_path / "model")  # the default suite has no converted SmolLM2
    assert main(["plan", str(CONFIG), f"model.path={model}", "--on", "2x8xH100-80GB"]) == 0
    assert "seconds of a step on 2x8xH100-80GB" in capsys.readouterr().out
