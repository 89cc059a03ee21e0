"""Compute threads: processes that compute at the same time share the cores."""

from gpu_machines import H100, machine, planned

from rlcore.plan import Facts


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


def test_more_threads_than_cores_are_noted() -> None:
    def notes(*overrides: str) -> list[str]:
        return [line for line in planned(*overrides, facts=machine(0, cpus=8)).notes if "cluster.threads" in line]

    assert notes("cluster.threads=5", "actor.data_parallel=2") == [
        "cluster.threads=5: the 2 processes of actor have 10 threads on 8 cores, and a step takes several times as "
        "long; set it to 0"
    ]
    assert notes("cluster.threads=4", "actor.data_parallel=2") == notes("cluster.threads=16") == []
