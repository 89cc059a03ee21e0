"""The suite of clusters: green on the local cluster."""

from rlcore.cluster.local import LocalCluster
from rlcore.contracts.clusters import ClusterOffer
from rlcore.testing import ClusterSuite


class TestLocalCluster(ClusterSuite):
    target = ClusterOffer("local", LocalCluster)
    restarts = True
