"""Pools: which are refused and why, and how their ranks are laid out over nodes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rlcore.contracts.offers import PoolSpec
from rlcore.errors import ConfigError, PlanError, PluginError, RlcoreError
from rlcore.plan import Facts, RunPlan, make_plan, plan_to_json
from rlcore.plugins import configure
from rlcore.testing.null import SETTINGS
from rlcore.testing.packages import importable, write_package

PLUGIN = """
from rlcore import PoolSpec, RolloutWorker, WorkerClass, hookimpl
from rlcore.testing.null import NullReplica


@hookimpl
def rlcore_resource_pools():
    return [{pools}]


class Mine(NullReplica):
    pass


@hookimpl
def rlcore_worker_classes():
    return [WorkerClass(RolloutWorker, "{backend}", Mine, isolated=True)]
"""
RAY = ("plugins.ray.address=10.0.0.1:6379",)
ENGINES = ("rollout.backend=null_replica", "rollout.pool=engines")
WHO = "plugin 'pooled' (pooled 1.0)"


def pooled(pools: str, backend: str = "mine") -> str:
    """A plugin with these pools, and a rollout."""
    return PLUGIN.format(pools=pools, backend=backend)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Path]:
    with importable(tmp_path / "site") as place:
        yield place


def planned(*overrides: str, plugins: tuple[str, ...] = (), facts: Facts | None = None) -> RunPlan:
    hooks, loaded = configure([], [*SETTINGS, *overrides], ["null", *plugins])
    return make_plan(loaded, hooks, facts or Facts(cpus=2))


def refused(kind: type[RlcoreError], *overrides: str, plugins: tuple[str, ...] = (), gpus: int = 0) -> str:
    """The one line with which the plan is refused."""
    with pytest.raises(kind) as caught:
        planned(*overrides, plugins=plugins, facts=Facts(cpus=2, gpus=gpus))
    line = str(caught.value)
    assert "\n" not in line
    return line


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        ("labels={tier: 'two words'}", "labels['tier'] is 'two words'; needs a text such as 'H100'"),
        ("labels={'-tier': fast}", "labels has the key '-tier'; needs a label of nodes"),
        ("resources={GPU: 2}", "resources has the key 'GPU'; needs the name of a custom resource"),
        ("resources={magic: 0}", "resources['magic'] is 0.0; needs a number above 0"),
        ("resources={magic: -1}", "resources['magic'] is -1.0; needs a number above 0"),
        ("resources={magic: 1.5}", "resources['magic'] is 1.5; above 1 it needs a whole number"),
        ("placement=tight", "cluster.pools.engines.placement: found 'tight'"),
        ("placement=spraed", "did you mean 'spread'? choose from: one_node, pack, spread, strict_spread"),
        ("labels=fast", "cluster.pools.engines.labels"),
        ("nodes=0", "cluster.pools.engines.nodes"),
    ],
)
def test_settings_of_a_pool_that_mean_nothing_are_refused_with_their_key(pool: str, message: str) -> None:
    line = refused(ConfigError, *ENGINES, *RAY, f"cluster.pools.engines.{pool}")
    assert "cluster.pools.engines" in line
    assert message in line


@pytest.mark.parametrize("pool", ["placement=spread", "labels={tier: fast}", "resources={magic: 1}"])
def test_settings_that_only_other_clusters_obey_have_no_effect_on_this_machine_and_say_so(pool: str) -> None:
    line = refused(ConfigError, *ENGINES, f"cluster.pools.engines.{pool}")
    assert "has no effect: it is used only when cluster.backend != 'local', and cluster.backend is 'local'" in line


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("placement='tight'", "placement is 'tight'; choose from: pack, spread, strict_spread, one_node"),
        ("placement=None", "placement is None"),
        ("labels=['fast']", "labels is ['fast']; needs a mapping of label to value"),
        ("labels={'tier': 1}", "labels['tier'] is 1; needs a text such as"),
        ("labels={1: 'fast'}", "labels has the key 1"),
        ("resources=4", "resources is 4; needs a mapping of custom resource to amount"),
        ("resources={'magic': '1'}", "resources['magic'] is '1'; needs a number above 0"),
        ("resources={'magic': True}", "resources['magic'] is True; needs a number above 0"),
        ("resources={'magic': float('nan')}", "resources['magic'] is nan; needs a number above 0"),
        ("resources={'CPU': 1}", "resources has the key 'CPU'"),
    ],
)
def test_a_pool_of_a_plugin_that_is_garbage_is_refused_with_the_field(site: Path, spec: str, message: str) -> None:
    write_package(site, "pooled", pooled(pools=f"PoolSpec('engines', {spec})"))
    line = refused(PluginError, *ENGINES, *RAY, plugins=("pooled",))
    assert line.startswith(f"{WHO}: rlcore_resource_pools(): PoolSpec 'engines': ")
    assert message in line


@pytest.mark.parametrize(
    ("pools", "overrides", "message"),
    [
        ("PoolSpec('idle')", (), f"pool 'idle' of {WHO} is unused: no role asks for it"),
        ("PoolSpec('engines', 1), PoolSpec('engines', 2)", ENGINES, "pool 'engines' is offered twice"),
        ("PoolSpec('engines', colocates=('mian',))", ENGINES, "which is not declared; did you mean 'main'?"),
        (
            "PoolSpec('engines', 1)",
            (*ENGINES, "cluster.device=cuda", "rollout.replicas=2"),
            f"pool 'engines' of {WHO} is too small: role 'rollout' of core needs 2 GPUs",
        ),
        (
            "PoolSpec('engines', labels={'tier': 'fast'})",
            ENGINES,
            f"pool 'engines' of {WHO}: asks for labels, which cluster.backend=local does not obey",
        ),
        (
            "PoolSpec('engines', resources={'magic': 1})",
            ENGINES,
            "asks for resources, which cluster.backend=local does not obey",
        ),
        (
            "PoolSpec('engines', placement='strict_spread')",
            ENGINES,
            "asks for placement=strict_spread, which cluster.backend=local does not obey",
        ),
        (
            "PoolSpec('engines', placement='strict_spread')",
            (*ENGINES, "plugins.ray={}"),
            "which cluster.backend=ray does not obey with these settings; needs a pool that asks for less, or a "
            "cluster that does: set plugins.ray.address",
        ),
        (
            "PoolSpec('engines', nodes=2, placement='one_node')",
            (*ENGINES, *RAY),
            "nodes=2 says where its ranks go, and so does placement=one_node; needs one of the two",
        ),
        (
            "PoolSpec('engines', colocates=('main',), placement='spread')",
            (*ENGINES, *RAY),
            "asks for placement=spread, but a union has the places of its members; say it of main",
        ),
        (
            "PoolSpec('engines', 3, colocates=('main',))",
            ENGINES,
            f"pool 'engines' of {WHO}: gpus_per_node=3, but a union has the devices of its members; leave it out, or",
        ),
        (
            "PoolSpec('engines', 3, colocates=('main',), nodes=2)",
            (*ENGINES, *RAY),
            "gpus_per_node=3 and nodes=2, but a union has the devices of its members; leave it out, or set it of main",
        ),
        (
            "PoolSpec('engines', 3, nodes=2)",
            (*ENGINES, *RAY, "cluster.device=cuda", "rollout.replicas=7"),
            "needs 7 GPUs (7 replicas x 1 ranks x 1), the pool has 6 on 2 nodes, each of which needs 4",
        ),
    ],
)
def test_pools_that_cannot_be_had_are_refused_by_name(
    site: Path, pools: str, overrides: tuple[str, ...], message: str
) -> None:
    write_package(site, "pooled", pooled(pools=pools))
    assert message in refused(PlanError, *overrides, plugins=("pooled",), gpus=8)


def test_an_argument_of_a_hook_with_a_default_gets_its_value(site: Path) -> None:
    hook = "rlcore_resource_pools(config=None, requests=())"
    pools = "PoolSpec(request.pool, 1) for request in requests if config is not None and request.pool == 'engines'"
    write_package(site, "pooled", pooled(pools=pools).replace("rlcore_resource_pools()", hook))
    plan = planned(*ENGINES, "cluster.device=cuda", plugins=("pooled",), facts=Facts(cpus=2, gpus=2))
    assert next(pool for pool in plan.pools if pool.name == "engines").provided_by == WHO


@pytest.mark.parametrize(
    ("gpus", "way_out"),
    [(0, "the machine has 0, so take them out: "), (2, "set cluster.device=cuda or take them out: ")],
)
def test_gpus_of_a_run_on_the_cpu_are_refused_with_a_setting_that_is_accepted(gpus: int, way_out: str) -> None:
    setting = "cluster.pools.main.gpus_per_node=0"
    line = refused(PlanError, "cluster.device=cpu", "cluster.pools.main.gpus_per_node=2", gpus=gpus)
    assert line == f"cluster.device=cpu, but pool 'main' has GPUs; {way_out}{setting}"
    assert planned("cluster.device=cpu", setting).pools[0].gpus_per_node == 0


def test_on_one_machine_ranks_are_together_and_spread_whatever_the_pool_asks(site: Path) -> None:
    for placement in ("spread", "one_node", "pack"):
        package = write_package(
            site, f"pooled_{placement}", pooled(pools=f"PoolSpec('engines', placement='{placement}')")
        )
        assert planned(*ENGINES, plugins=(package,)).pools[0].placement == placement


@pytest.mark.slow
def test_the_users_pool_wins_over_two_that_are_offered_and_keeps_what_it_leaves_open(site: Path) -> None:
    pool = "PoolSpec('engines', 1, placement='spread', labels={'tier': 'fast'}, resources={'magic': 1})"
    write_package(site, "pooled", pooled(pools=pool))
    mine = ("rollout.backend=mine", "rollout.pool=engines", *RAY)
    made = planned(*mine, "cluster.pools.engines.resources={magic: 2}", plugins=("pooled",))
    found = made.pools[0]
    assert (found.name, found.gpus_per_node, found.provided_by) == ("engines", 0, "config (cluster.pools)")
    assert (found.placement, found.labels, found.resources) == ("spread", {"tier": "fast"}, {"magic": 2.0})
    shown = plan_to_json(made)["pools"]["engines"]
    assert [shown[name] for name in ("placement", "labels", "resources")] == [
        "spread",
        {"tier": "fast"},
        {"magic": 2.0},
    ]
    twice = "PoolSpec('engines', 1), PoolSpec('engines', 2)"
    write_package(site, "twice", pooled(twice, "twice"))
    decided = planned("rollout.backend=twice", *mine[1:], "cluster.pools.engines.nodes=1", plugins=("twice",))
    assert decided.pools[0].provided_by == "config (cluster.pools)"


def test_a_plugin_may_say_what_the_rollouts_pool_is(site: Path) -> None:
    write_package(site, "pooled", pooled(pools="PoolSpec('engines', 4)"))
    made = planned(*ENGINES, "cluster.device=cuda", plugins=("pooled",), facts=Facts(cpus=2, gpus=8))
    assert next((pool.name, pool.gpus_per_node, pool.provided_by) for pool in made.pools) == ("engines", 4, WHO)


def test_labels_may_negate_and_list_values() -> None:
    for value in ("H100", "!H100", "in(H100, H200)", "!in(a,b)"):
        assert PoolSpec("x", labels={"vendor.io/accelerator-type": value}).labels


def test_a_pool_of_several_nodes_is_as_large_as_the_node_that_has_most() -> None:
    made = planned(*ENGINES, *RAY, "cluster.device=cuda", "rollout.replicas=5", "cluster.pools.engines.nodes=2")
    assert next((pool.name, pool.gpus_per_node, pool.nodes) for pool in made.pools) == ("engines", 3, 2)
