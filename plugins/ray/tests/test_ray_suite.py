"""Ray runs through the conformance suite of clusters, in a process whose threads Ray may keep."""

import json
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
    settings = {"plugins.ray.object_store_gib": 0.1}
    restarts = True
    leaves_nothing = False


def test_ray_passes_every_check_of_the_suite() -> None:
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=390, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {}


if __name__ == "__main__":
    print(json.dumps(failures(RaySuite)))
