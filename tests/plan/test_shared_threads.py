"""Compute threads: processes that compute at the same time share the cores."""

from collections.abc import Sequence

from gpu_machines import H100, machine, planned

from rlcore.plan import Facts, make_plan
from rlcore.plugins import configure
from rlcore.testing.null import SETTINGS


def test_processes_share_the_cores() -> None:
    def threads(*overrides: str, facts: Facts = H100) -> dict[str, int]:
        plan = planned(*overrides, facts=facts)
        return {worker.request.role.name: worker.request.threads for worker in plan.workers}

    assert threads() == {"actor": 52, "rollout": 52}, "the embedded sampler lives in the actor's process"
    assert threads("actor.data_parallel=8", facts=machine(8)) == {"actor": 6, "rollout": 6}
    kl = ("algo.kl.placement=loss", "actor.data_parallel=4")
    assert threads(*kl, facts=machine(8)) == {"actor": 6, "reference": 6, "rollout": 6}
    assert threads("actor.data_parallel=8", facts=machine(8, cpus=4))["actor"] == 1
    assert threads("cluster.threads=3") == {"actor": 3, "rollout": 3}
    assert threads(facts=machine(0)) == {"actor": 0, "rollout": 0}, "one per core, as the cluster says"
    plan = planned("actor.data_parallel=8", facts=machine(8))
    assert plan.choices[-1].reason == "52 cores shared out among 8 processes of workers"


def test_ranks_on_a_cpu_share_its_cores() -> None:
    cpu = machine(0, cpus=8)
    ranks = "actor.data_parallel=2", "algo.kl.placement=loss"
    plan = planned(*ranks, facts=cpu)
    assert {worker.request.role.name: worker.request.threads for worker in plan.workers} == {
        "actor": 4,
        "reference": 4,
        "rollout": 4,
    }
    (choice,) = (choice for choice in plan.choices if choice.key == "cluster.threads")
    assert (choice.value, choice.reason) == (4, "8 cores shared out among the processes of actor (2), reference (2)")
    few = planned("actor.data_parallel=4", facts=machine(0, cpus=2))
    assert {worker.request.threads for worker in few.workers} == {1}
    assert not any("threads" in note for note in (*plan.notes, *few.notes))


def shared(*overrides: str, plugins: Sequence[str] = ("null",)) -> tuple[dict[str, int], list[str]]:
    """Threads by role on a CPU of twelve cores with two samplers in separate processes, and the reasons."""
    settings = (*SETTINGS, "rollout.backend=null_replica", "rollout.replicas=2", *overrides)
    hooks, config = configure([], settings, plugins)
    plan = make_plan(config, hooks, Facts(cpus=12))
    threads = {worker.request.role.name: worker.request.threads for worker in plan.workers}
    return threads, [choice.reason for choice in plan.choices if choice.key == "cluster.threads"]


def test_samplers_share_the_cores_with_an_actor_that_trains_meanwhile() -> None:
    assert shared() == ({"actor": 0, "rollout": 6}, ["12 cores shared out among the processes of rollout (2)"])
    assert shared("schedule.stream_minibatches=true") == shared(), "no update begins before all is sampled"
    reason = "12 cores shared out among the processes of actor (1), rollout (2)"
    assert shared("schedule.max_staleness=1") == ({"actor": 4, "rollout": 4}, [reason])
    embedded = planned("schedule.max_staleness=1", facts=machine(0, cpus=12))
    assert {worker.request.threads for worker in embedded.workers} == {0}, "they take turns in one process"


def test_roles_of_updates_take_turns() -> None:
    threads, _ = shared("schedule.max_staleness=1", "algo.kl.placement=loss", "actor.data_parallel=2")
    assert threads == {"actor": 3, "reference": 3, "rollout": 3}, "the reference has the actor's ranks"


JUDGE = ("plugins.reward_loop.models.judge.path=none", "plugins.reward_loop.models.judge.backend=hf")
GRADED = ("plugins.reward_loop.rewards.good.served_by=judge", "plugins.reward_loop.rewards.good.kind=model")
SLOWER = "plugins.reward_loop.models.judge.threads=2"
WITH_JUDGE = ("null", "reward_loop")


def test_samplers_and_reward_models_share_the_cores() -> None:
    threads, _ = shared(*JUDGE, *GRADED, plugins=WITH_JUDGE)
    assert threads == {"actor": 0, "rollout": 4, "judge": 4}
    threads, _ = shared(*JUDGE, *GRADED, "schedule.max_staleness=1", plugins=WITH_JUDGE)
    assert threads == {"actor": 3, "rollout": 3, "judge": 3}
    threads, _ = shared(*JUDGE, *GRADED, SLOWER, plugins=WITH_JUDGE)
    assert threads == {"actor": 0, "rollout": 6, "judge": 2}, "what is set stays"
    embedded = ("schedule.max_staleness=1", "rollout.backend=null", "rollout.replicas=1")
    threads, _ = shared(*JUDGE, *GRADED, *embedded, plugins=WITH_JUDGE)
    assert threads == {"actor": 0, "rollout": 0, "judge": 0}, "the actor samples and trains in turn"


def test_more_threads_than_cores_are_noted() -> None:
    def notes(*overrides: str) -> list[str]:
        return [line for line in planned(*overrides, facts=machine(0, cpus=8)).notes if "cluster.threads" in line]

    assert notes("cluster.threads=5", "actor.data_parallel=2") == [
        "cluster.threads=5: the processes of actor (2) have 10 threads on 8 cores, and a step takes several times as "
        "long; set it to 0"
    ]
    assert notes("cluster.threads=4", "actor.data_parallel=2") == notes("cluster.threads=16") == []


def test_more_threads_than_cores_are_noted_for_roles_together() -> None:
    def notes(threads: int, *overrides: str) -> list[str]:
        settings = (*SETTINGS, "rollout.backend=null_replica", f"cluster.threads={threads}", *overrides)
        hooks, config = configure([], settings, WITH_JUDGE if GRADED[0] in overrides else WITH_JUDGE[:1])
        return [line for line in make_plan(config, hooks, Facts(cpus=4)).notes if "cluster.threads" in line]

    assert notes(4, "schedule.max_staleness=1") == [
        "cluster.threads=4: the processes of rollout (1), actor (1) have 8 threads on 4 cores, and a step takes "
        "several times as long; set it to 0"
    ]
    assert notes(4) == [], "they take turns"
    assert notes(4, *JUDGE, *GRADED, SLOWER) == [], "the judge's threads are set by another key"
    assert notes(1, "rollout.replicas=5") == [], "fewer threads are not possible"
