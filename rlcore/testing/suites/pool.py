"""The suite of resource pools."""

from collections.abc import Sequence
from typing import Any

from rlcore.contracts.offers import PoolSpec
from rlcore.contracts.requests import WorkerRequest
from rlcore.testing.suites.harness import Suite


class ResourcePoolSuite(Suite):
    """The pools of a plugin; `target` is its hook `rlcore_resource_pools`."""

    requests: Sequence[WorkerRequest] = ()
    """Requests of the roles that the pools are for, as the plugin's components state them."""
    elsewhere: Sequence[str] = ()
    """Pools of other plugins that `colocates` may name, in addition to 'main'."""

    def pools(self, requests: Sequence[WorkerRequest]) -> list[PoolSpec]:
        """The hook's offers for these requests."""
        names = self.load().__code__.co_varnames[: self.load().__code__.co_argcount]
        arguments: dict[str, Any] = {"config": self.config(), "requests": tuple(requests)}
        found = self.load()(**{name: arguments[name] for name in names})
        good = isinstance(found, (list, tuple)) and all(isinstance(pool, PoolSpec) for pool in found)
        self.need(good, f"returned {found!r:.80}; needs a list of PoolSpec")
        return list(found)

    def test_each_pool_has_a_name_and_a_size(self) -> None:
        """Names differ. GPUs are at least 0, where 0 is derived; nodes are at least 1."""
        pools = self.pools(self.requests)
        names = [pool.name for pool in pools]
        self.need(bool(names), "offers no pool for `requests`; needs at least one")
        self.need(all(isinstance(name, str) and name for name in names), f"a name is not text: {names}")
        self.need(len(set(names)) == len(names), f"offers a name twice: {names}")
        for pool in pools:
            for what, least in (("gpus_per_node", 0), ("nodes", 1)):
                value = getattr(pool, what)
                good = isinstance(value, int) and not isinstance(value, bool) and value >= least
                self.need(good, f"pool '{pool.name}': {what} is {value!r}; needs an int from {least}")

    def test_each_pool_is_used_by_a_role(self) -> None:
        """A pool that no role uses is an error of the plan."""
        used = {request.pool for request in self.requests}
        for pool in self.pools(self.requests):
            self.need(pool.name in used, f"pool '{pool.name}' is of no role; the roles use: {', '.join(sorted(used))}")

    def test_without_its_roles_there_are_no_pools(self) -> None:
        """The plugin may be enabled for another purpose."""
        found = [pool.name for pool in self.pools(())]
        self.need(not found, f"offers {', '.join(found)} without any request; needs none")

    def test_a_pool_is_as_large_as_its_roles_need(self) -> None:
        """Its devices are at least those of its largest role, unless its size is derived."""
        for pool in self.pools(self.requests):
            devices = pool.gpus_per_node * pool.nodes
            for request in self.requests:
                due = request.gpus * request.ranks
                if request.pool == pool.name and pool.gpus_per_node:
                    who = (
                        f"pool '{pool.name}' has {devices} GPUs, a replica of role '{request.role.name}' needs {due:g}"
                    )
                    self.need(devices >= due, who)

    def test_a_union_is_of_pools_that_there_are(self) -> None:
        """The members are pools of the plugin, 'main', or those of `elsewhere`."""
        pools = self.pools(self.requests)
        known = {pool.name for pool in pools} | {"main", *self.elsewhere}
        for pool in pools:
            unknown = sorted(set(pool.colocates) - known)
            self.need(not unknown, f"pool '{pool.name}' is a union of {', '.join(unknown)}, which there is not")
            self.need(pool.name not in pool.colocates, f"pool '{pool.name}' is a union of itself")

    def test_it_declares_the_same_whenever_it_is_asked(self) -> None:
        """The order of the requests does not matter."""
        one, other = (
            sorted(self.pools(order), key=lambda pool: pool.name) for order in (self.requests, self.requests[::-1])
        )
        self.need(one == other, f"offers {one}, and then {other}; needs the same")
