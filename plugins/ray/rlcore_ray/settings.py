"""The section `plugins.ray`, and Ray's abilities under it."""

from dataclasses import dataclass

from rlcore import ConfigError, RunConfig, option
from rlcore.contracts.clusters import ClusterAbilities, ProcessUse


@dataclass(frozen=True)
class RaySettings:
    """The Ray cluster that the workers run on: one to join, or one that the run starts."""

    address: str = ""
    """Ray cluster to join, such as '10.0.0.1:6379', or 'auto' for one on this machine; empty: start one."""
    placement_s: float = option(300.0, above=0)
    """Seconds to wait for a pool's resources: other runs may hold them, or nodes may be starting."""
    object_store_gib: float = option(0.0, used_when="plugins.ray.address == ''", at_least=0)
    """Object store memory of a Ray started here, for batches; 0: Ray decides."""
    dashboard: bool = option(False, used_when="plugins.ray.address == ''")
    """Also start Ray's dashboard."""

    def __post_init__(self) -> None:
        port = self.address.rpartition(":")[2]
        if "://" in self.address or (port.isdecimal() and not 0 < int(port) < 65536):
            raise ConfigError(
                f"plugins.ray.address: found '{self.address}'; needs the host:port of a Ray head (port 1 to 65535, no "
                "ray:// or http://), as `ray start --head` prints it, or 'auto', or none to start Ray on this machine"
            )


def abilities(config: RunConfig, section: RaySettings) -> ClusterAbilities:
    """A joined cluster has nodes, labels and resources; a Ray started here is this machine."""
    if not section.address:
        return ClusterAbilities(processes=ProcessUse.ALL, starts_together=True, more_with="plugins.ray.address")
    return ClusterAbilities(
        processes=ProcessUse.ALL,
        starts_together=True,
        elsewhere=True,
        several_nodes=True,
        placements=frozenset({"pack", "spread", "strict_spread", "one_node"}),
        labels=True,
        resources=True,
    )
