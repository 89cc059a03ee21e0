"""examples/cluster/slurm.sbatch on a real Ray of two nodes; of Slurm only `srun` and `scontrol` are made up."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from rlcore_ray.testing import NEEDS_RAY

from rlcore.testing.runs import run_settings

pytestmark = [pytest.mark.fault, pytest.mark.timeout(180), pytest.mark.xdist_group("machine"), NEEDS_RAY]

SCRIPT = Path(__file__).parents[3] / "examples" / "cluster" / "slurm.sbatch"
PROGRAMS = {
    "srun": '#!/usr/bin/env bash\nwhile [[ "$1" == --* ]]; do shift; done\nexec "$@"\n',
    "scontrol": "#!/bin/sh\nprintf 'first\\nsecond\\n'\n",
    "hostname": "#!/bin/sh\necho 127.0.0.1\n",
}


def test_the_slurm_script_trains_on_two_nodes_of_ray_and_leaves_nothing_behind(tmp_path: Path) -> None:
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    more = {"train.name": "sums", "rollout.backend": "null_replica", "rollout.replicas": 2, "rollout.pool": "sampling"}
    # A pool whose replicas stand on different nodes finds no place on one.
    settings = run_settings(tmp_path, 2, **more) | {"cluster.pools.sampling.placement": "strict_spread"}
    values = [f"{key}={value}" for key, value in settings.items()]
    (tmp_path / "config.yaml").write_text("plugins: {ray: {}, 'null': {}}")
    path = os.pathsep.join((str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]))
    slurm = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "[first-second]"}
    done = subprocess.run(
        ["bash", str(SCRIPT), "config.yaml", "sums", *values],
        cwd=tmp_path,
        env=os.environ | {"PATH": path} | slurm,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "trained 2 steps" in done.stdout
