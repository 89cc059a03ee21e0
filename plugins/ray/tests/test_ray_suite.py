"""Ray runs through the conformance suite of clusters, in a process of which Ray was started before, once for all."""

import json
import os
import subprocess
import sys

import pytest
from rlcore_ray import rlcore_clusters
from rlcore_ray.testing import NEEDS_RAY

from rlcore.testing.suites.cluster import ClusterSuite
from rlcore.testing.suites.harness import failures

pytestmark = [pytest.mark.real, pytest.mark.timeout(400), pytest.mark.xdist_group("machine"), NEEDS_RAY]


class RaySuite(ClusterSuite):
    target = rlcore_clusters()[0]
    plugins = ("ray",)
    restarts = True
    leaves_nothing = False


def test_ray_passes_every_check_of_the_suite() -> None:
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=390, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {}


if __name__ == "__main__":
    import ray

    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    memory = 100 * 2**20
    ray.init("local", num_cpus=4, object_store_memory=memory, include_dashboard=False, configure_logging=False)
    found = failures(RaySuite)
    ray.shutdown()
    print(json.dumps(found))
