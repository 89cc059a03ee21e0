"""An rlcore plugin: workers as Ray actors, on one node or many."""

from collections.abc import Sequence

from rlcore import ConfigSection, hookimpl
from rlcore.contracts.clusters import ClusterOffer
from rlcore_ray.cluster import RayCluster
from rlcore_ray.places import problems
from rlcore_ray.settings import RaySettings, abilities

NAME = "ray"


@hookimpl
def rlcore_config_sections() -> Sequence[ConfigSection]:
    return [ConfigSection(NAME, RaySettings, {"cluster.backend": NAME})]


@hookimpl
def rlcore_clusters() -> Sequence[ClusterOffer]:
    return [ClusterOffer(NAME, RayCluster, abilities, problems)]
