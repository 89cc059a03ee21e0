"""The suite of clusters: green on the local cluster."""

import pytest

from rlcore.cluster.local import LocalCluster
from rlcore.contracts.clusters import ClusterOffer
from rlcore.testing import ClusterSuite


@pytest.mark.slow
class TestLocalCluster(ClusterSuite):
    target = ClusterOffer("local", LocalCluster)
    restarts = True
