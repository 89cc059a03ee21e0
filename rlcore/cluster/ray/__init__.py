"""Workers as actors of Ray, on one node or many. Only this package imports ray."""

from rlcore.cluster.ray.cluster import RayCluster

__all__ = ["RayCluster"]
