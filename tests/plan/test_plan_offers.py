"""Plans with plugins: what their components ask for, what they offer, and how they clash."""

import json
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path

import pytest

from rlcore.errors import ConfigError, PlanError, PluginError, RlcoreError
from rlcore.plan import Facts, RunPlan, make_plan, plan_to_json
from rlcore.plugins import configure
from rlcore.testing.null import SETTINGS
from rlcore.testing.packages import importable, write_package

HEAD = """
    from rlcore.contracts.actor import ActorWorker
    from rlcore.contracts.agents import AgentLoop
    from rlcore.contracts.critic import CriticWorker
    from rlcore.contracts.hooks import hookimpl
    from rlcore.contracts.offers import *; from rlcore.contracts.components import *
    from rlcore.config.providers import *
    from rlcore.contracts.reward_manager import RewardManager
    from rlcore.contracts.rollout import RolloutWorker
    from rlcore.testing.null import NullActor, NullRollout
    from rlcore.contracts.workers import Worker

    class Judge(Worker):
        def setup(self): ...

    JUDGE = Role("judge", Judge)
"""


MANAGER = (
    HEAD
    + """
    @hookimpl
    def rlcore_reward_managers():
        def asks(config, section):
            return [WorkerRequest(JUDGE, "fast"{more})]

        return [Component("judged", lambda context: None, asks, uses_reward_functions=True)]

    @hookimpl
    def rlcore_worker_classes():
        return [WorkerClass(Judge, "fast", Judge)]
"""
)


def manager(more: str = "") -> str:
    """A plugin with a reward manager that needs a separate worker."""
    return MANAGER.replace("{more}", more)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Path]:
    """A directory of packages that are installed for the test."""
    with importable(tmp_path / "site") as place:
        yield place


def plan(*overrides: str, plugins: tuple[str, ...] = (), facts: Facts | None = None) -> RunPlan:
    """The production plan of the null run with some overrides."""
    hooks, loaded = configure([], [*SETTINGS, *overrides], ["null", *plugins])
    return make_plan(loaded, hooks, facts or Facts(cpus=2))


def refused(kind: type[RlcoreError], *overrides: str, plugins: tuple[str, ...] = (), facts: Facts | None = None) -> str:
    """The one line with which the plan is refused."""
    with pytest.raises(kind) as caught:
        plan(*overrides, plugins=plugins, facts=facts)
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_a_critic_that_no_estimator_reads_is_refused(site: Path) -> None:
    source = (
        HEAD
        + """
    @hookimpl
    def rlcore_critic_engines():
        return [Component("valued", lambda context: None)]
    """
    )
    write_package(site, "plan_critic", source)
    assert "critic.engine=valued has no effect" in refused(
        ConfigError, "critic.engine=valued", plugins=("plan_critic",)
    )
    made = plan("critic.engine=valued", "algo.advantage=gae", plugins=("plan_critic",))
    assert made.components["critic"].provided_by == "plugin 'plan_critic' (plan-critic 1.0)"


def test_an_estimator_that_needs_a_reference_says_what_to_set(site: Path) -> None:
    source = (
        HEAD
        + """
    @hookimpl
    def rlcore_algorithms():
        needs = frozenset({Need.REFERENCE})
        return [Algorithm("anchored", AlgorithmKind.ADVANTAGE, "rlcore.algo.advantage:grpo", Scope.GROUP, needs)]
    """
    )
    write_package(site, "plan_needs", source)
    line = refused(ConfigError, "algo.advantage=anchored", plugins=("plan_needs",))
    assert "algo.kl.placement=loss" in line
    assert "plugin 'plan_needs' (plan-needs 1.0)" in line


def test_a_component_gets_the_workers_it_asks_for_in_the_pool_it_names(site: Path) -> None:
    pools = """
    @hookimpl
    def rlcore_resource_pools(requests):
        return [PoolSpec("judges")] if any(request.role is JUDGE for request in requests) else []
    """
    write_package(site, "plan_judge", manager(', pool="judges", replicas=2') + pools)
    made = plan("reward.manager=judged", plugins=("plan_judge",))
    judge = next(worker for worker in made.workers if worker.request.role.name == "judge")
    assert judge.asked_by == "reward 'judged' of plugin 'plan_judge' (plan-judge 1.0)"
    assert [(pool.name, pool.provided_by) for pool in made.pools] == [
        ("judges", "plugin 'plan_judge' (plan-judge 1.0)"),
        ("main", "plugin 'core' (rlcore 0.1.0)"),
    ]
    assert "cluster.pools.judges.gpus_per_node=N" in refused(
        PlanError, "reward.manager=judged", "plugins.plan_nopool={}", plugins=(_without_pool(site),)
    )


def _without_pool(site: Path) -> str:
    return write_package(site, "plan_nopool", manager(', pool="judges"'))


def test_devices_of_a_rank_divide_those_of_a_node(site: Path) -> None:
    write_package(site, "plan_wide", manager(', pool="judges", gpus=3.0'))
    settings = ("reward.manager=judged", "cluster.device=cuda", "cluster.pools.judges.gpus_per_node=3")
    eight = Facts(cpus=2, gpus=8, gpus_per_node=4)
    with pytest.raises(PlanError, match="a rank has 3 devices, and a node 4"):
        plan(*settings, plugins=("plan_wide",), facts=eight)
    assert plan(*settings, plugins=("plan_wide",), facts=Facts(cpus=2, gpus=8))


def test_the_users_pool_wins_and_its_size_is_checked(site: Path) -> None:
    write_package(site, "plan_gpus", manager(', pool="judges", gpus=1.0, replicas=3'))
    common = ("reward.manager=judged", "cluster.device=cuda")
    big, four = (*common, "cluster.pools.judges.gpus_per_node=3"), Facts(cpus=2, gpus=4)
    made = plan(*big, plugins=("plan_gpus",), facts=four)
    assert [(p.name, p.gpus_per_node, p.gpus, p.provided_by) for p in made.pools] == [
        ("judges", 3, (0, 1, 2), "config (cluster.pools)"),
        ("main", 1, (3,), "plugin 'core' (rlcore 0.1.0)"),
    ]
    derived = plan(*common, "cluster.pools.judges.gpus_per_node=0", plugins=("plan_gpus",), facts=four)
    assert derived.pools[0].gpus_per_node == 3
    small = (*common, "cluster.pools.judges.gpus_per_node=2")
    line = refused(PlanError, *small, plugins=("plan_gpus",), facts=four)
    assert "pool 'judges' of config (cluster.pools) is too small: role 'judge' of reward 'judged'" in line
    assert "needs 3 GPUs (3 replicas x 1 ranks x 1), the pool has 2" in line
    assert "the pools need 4 GPUs" in refused(PlanError, *big, plugins=("plan_gpus",), facts=Facts(gpus=3))


def test_a_union_pool_has_the_devices_of_its_members(site: Path) -> None:
    pools = """
    @hookimpl
    def rlcore_resource_pools(requests):
        return [PoolSpec("judges", colocates=("left", "right")), PoolSpec("left", 1), PoolSpec("right", 1)]
    """
    write_package(site, "plan_union", manager(', pool="judges", gpus=1.0, replicas=2') + pools)
    made = plan("reward.manager=judged", "cluster.device=cuda", plugins=("plan_union",), facts=Facts(gpus=3))
    assert {pool.name: pool.gpus for pool in made.pools} == {
        "judges": (0, 2),
        "left": (0,),
        "main": (1,),
        "right": (2,),
    }


@pytest.mark.parametrize(
    ("body", "overrides", "kind", "problems"),
    [
        (
            "@hookimpl\ndef rlcore_worker_classes(): return [WorkerClass(ActorWorker, 'null', NullActor)]",
            ("plugins.plan_clash={}",),
            PlanError,
            ("role 'actor'", "plugin 'null'", "plugin 'plan_clash' (plan-clash 1.0)"),
        ),
        (
            "@hookimpl\ndef rlcore_agent_loops(): return [Component('single_turn', lambda context: None)]",
            (),
            PluginError,
            ("rollout.agent=single_turn", "plugin 'core'", "plugin 'plan_clash' (plan-clash 1.0)"),
        ),
        (
            "@hookimpl\ndef rlcore_resource_pools(): return [PoolSpec('main')]",
            (),
            PlanError,
            ("pool 'main' is offered twice", "plugin 'core'", "plugin 'plan_clash'"),
        ),
        (
            "@hookimpl\ndef rlcore_resource_pools(): return [PoolSpec('mine')]",
            (),
            PlanError,
            ("pool 'mine' of plugin 'plan_clash'", "is unused"),
        ),
        (
            "@hookimpl\ndef rlcore_reward_functions(): return [RewardFunction('count_letter', 'math:sqrt')]",
            (),
            PluginError,
            ("reward.functions.letters.fn=count_letter", "plugin 'null'", "plugin 'plan_clash'"),
        ),
        (
            "class Half(ActorWorker): ...\n"
            "@hookimpl\ndef rlcore_worker_classes(): return [WorkerClass(ActorWorker, 'half', Half)]",
            ("actor.backend=half",),
            PluginError,
            ("plan_clash.Half as ActorWorker for backend 'half', but it is abstract", "save, setup, update"),
        ),
        (
            "@hookimpl\ndef rlcore_worker_classes(): return [WorkerClass(ActorWorker, 'other', NullRollout)]",
            ("actor.backend=other",),
            PluginError,
            ("NullRollout as ActorWorker for backend 'other', but it does not inherit from ActorWorker",),
        ),
        (
            "@hookimpl\ndef rlcore_agent_loops():\n"
            "    ask = lambda config, section: [WorkerRequest(Role('actor', ActorWorker), 'null')]\n"
            "    return [Component('greedy', lambda context: None, ask)]",
            ("rollout.agent=greedy",),
            PlanError,
            ("role 'actor' has two owners", "agent 'greedy' of plugin 'plan_clash' (plan-clash 1.0) and core"),
        ),
        (
            "@hookimpl\ndef rlcore_agent_loops():\n"
            "    return [Component('odd', lambda context: None, lambda config, section: None)]",
            ("rollout.agent=odd",),
            PluginError,
            ("agent 'odd' of plugin 'plan_clash'", "requests() returned NoneType"),
        ),
    ],
)
def test_plugins_that_clash_or_break_are_refused_by_name(
    site: Path, body: str, overrides: tuple[str, ...], kind: type[RlcoreError], problems: tuple[str, ...]
) -> None:
    source = "\n".join(line[4:] for line in HEAD.splitlines()) + "\n" + body
    write_package(site, "plan_clash", source)
    line = refused(kind, *overrides, plugins=("plan_clash",))
    for problem in problems:
        assert problem in line


def test_an_embedded_rollout_refuses_a_sharded_actor_and_names_what_can_serve_it(site: Path) -> None:
    source = (
        HEAD
        + """
    class Trunk(Worker):
        def setup(self): ...
    TRUNK = Role("trunk", Trunk)
    class Head(Worker):
        def setup(self): ...

    @hookimpl
    def rlcore_agent_loops():
        asks = lambda config, section: [WorkerRequest(TRUNK, "t", ranks=2), WorkerRequest(Role("head", Head), "t")]
        return [Component("sharded", lambda context: None, asks)]

    @hookimpl
    def rlcore_worker_classes():
        return [WorkerClass(Trunk, "t", Trunk), WorkerClass(Head, "t", Head, embedded_in=TRUNK)]
    """
    )
    write_package(site, "plan_sharded", source)
    line = refused(PlanError, "rollout.agent=sharded", plugins=("plan_sharded",))
    assert "role 'head'" in line
    assert "sharded over 2 ranks" in line
    assert line.endswith("it needs one rank; set trunk.ranks=1"), "no other class implements the interface"
    line = refused(PlanError, "actor.data_parallel=2")
    assert "role 'rollout'" in line
    assert line.endswith("choose from: rollout.backend=hf, rollout.backend=null_replica")


def test_an_enabled_plugin_that_is_not_used_stops_the_run(site: Path) -> None:
    write_package(site, "plan_idle", manager())
    line = refused(PlanError, plugins=("plan_idle",))
    assert line.startswith("plugin 'plan_idle' (plan-idle 1.0) is enabled, but nothing of it is in the plan")


def test_a_plugin_that_only_sets_a_default_is_used_while_that_default_holds(site: Path) -> None:
    source = (
        HEAD
        + """
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Settings:
        level: int = 0

    @hookimpl
    def rlcore_config_sections():
        return [ConfigSection("plan_default", Settings, {"train.prompts_per_step": 4})]
    """
    )
    write_package(site, "plan_default", source)
    assert plan(plugins=("plan_default",)).batch_sizes["prompts"] == 4
    line = refused(PlanError, "train.prompts_per_step=2", plugins=("plan_default",))
    assert "nothing of it is in the plan" in line


@pytest.mark.slow
def test_the_order_of_plugins_has_no_meaning(site: Path) -> None:
    write_package(site, "plan_one", manager())
    write_package(
        site,
        "plan_two",
        HEAD
        + """
    class Other(Worker):
        def setup(self): ...

    @hookimpl
    def rlcore_reward_functions():
        return [RewardFunction("second", "math:sqrt", Scope.GROUP, 5.0)]

    @hookimpl
    def rlcore_worker_classes():
        return [WorkerClass(Other, "null", Other)]
    """,
    )
    overrides = ("reward.manager=judged", "reward.functions.second.fn=second")
    shown = {
        json.dumps(plan_to_json(plan(*overrides, plugins=order)), default=str)
        for order in permutations(("plan_one", "plan_two", "null"))
    }
    saved = {json.dumps(json.loads(line) | {"config": None}, sort_keys=True) for line in shown}
    assert len(saved) == 1
    lines = {
        refused(PlanError, "reward.manager=judged", "actor.backend=x", plugins=order)
        for order in permutations(("plan_one", "plan_two"))
    }
    assert len(lines) == 1


def test_unused_offers_unknown_facts_and_a_missing_canary_are_noted(site: Path) -> None:
    source = (
        manager()
        + """
    @hookimpl
    def rlcore_reward_functions():
        return [RewardFunction("third", "math:sqrt")]
    """
    )
    write_package(site, "plan_notes", source)
    notes = "\n".join(plan("reward.functions.letters.fn=third", plugins=("plan_notes",)).notes)
    assert "unused: Judge for (Judge, fast) of plugin 'plan_notes' (plan-notes 1.0)" in notes
    assert "unknown: the number of parameters" in notes
    assert "no canary" in notes
