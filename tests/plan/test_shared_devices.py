"""The plan of shared devices and of weights that travel."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rlcore_view import StepFacts, Watch

from rlcore import PlanError
from rlcore.cluster.worker_context import cluster_context, context_of
from rlcore.contracts.clusters import Deadlines
from rlcore.engines.hf.worker import HfActor
from rlcore.plan import Facts, RunPlan, make_plan
from rlcore.plugins import configure
from rlcore.testing.null import SETTINGS
from rlcore.testing.packages import importable, write_package
from rlcore.types import plain

VLLM = ("rollout.backend=vllm", "plugins.vllm={}")


@pytest.fixture(autouse=True)
def site(tmp_path: Path) -> Iterator[None]:
    """A directory of packages that are installed for the test."""
    with importable(tmp_path / "site"):
        yield


@pytest.mark.parametrize(
    ("backend", "limit", "difference", "evidence"),
    [
        ("null_replica", 0.05, 0.06, ["log-probs of rollout.backend=null_replica and of the actor differ by 0.06 per"]),
        ("null_replica", 0.05, 0.04, []),
        ("null_replica", 0.5, 0.06, []),
        ("null", 0.05, 0.06, ["log-probs of the trajectories and of the actor differ by 0.06 per"]),
    ],
)
def test_a_copy_of_the_weights_that_samples_another_policy_is_reported_for_any_backend(
    backend: str, limit: float, difference: float, evidence: list[str]
) -> None:
    hooks, loaded = configure(
        [], [*SETTINGS, f"rollout.backend={backend}", f"rollout.warn_logprob_diff={limit}"], ["null"]
    )
    plan = make_plan(loaded, hooks, Facts(cpus=2))
    found = Watch(plain(plan.loaded.saved)).step(StepFacts(3, {"policy/rollout_logprob_diff": difference}))
    assert [finding.evidence.partition(" token")[0] for finding in found] == evidence


SERVED = """
from rlcore import Component, CriticWorker, Role, RewardReplica, Worker, WorkerClass, WorkerRequest, hookimpl
from rlcore.testing.null_critic import NullCritic


class Judge(Worker):
    def setup(self): ...


class Sleeper(RewardReplica):
    def setup(self): ...

    async def score(self, requests): ...

    async def health(self): ...

    async def sleep(self): ...

    async def wake(self): ...


def asks(role, backend):
    return lambda config, section: [WorkerRequest(role, backend, gpus=1.0 if config.cluster.device == "cuda" else 0.0)]


def managed(name, role):
    return Component(name, lambda context: None, asks(role, "mine"), uses_reward_functions=True)


@hookimpl
def rlcore_reward_managers():
    return [
        managed("restless", Role("judge", Judge)),
        managed("restful", Role("judge", RewardReplica)),
    ]


@hookimpl
def rlcore_critic_engines():
    return [Component("valued", lambda context: None, asks(Role("critic", CriticWorker), "null"))]


@hookimpl
def rlcore_worker_classes():
    return [WorkerClass(Judge, "mine", Judge), WorkerClass(RewardReplica, "mine", Sleeper)]
"""


def test_a_judge_on_the_actors_device_sleeps_or_is_refused_and_a_critic_takes_its_turn(tmp_path: Path) -> None:
    write_package(tmp_path / "site", "served", SERVED)

    def made(*overrides: str, device: str = "cuda") -> RunPlan:
        hooks, loaded = configure([], [*SETTINGS, f"cluster.device={device}", *overrides], ["null", "served"])
        return make_plan(loaded, hooks, Facts(cpus=8, gpus=8))

    assert made("reward.manager=restful").colocated_roles == ("judge",)
    with pytest.raises(PlanError) as caught:
        made("reward.manager=restless")
    line = str(caught.value)
    assert line.startswith(
        "role 'judge' of reward 'restless' of plugin 'served' (served 1.0) is in pool 'main', on whose"
    )
    assert "but Judge of plugin 'served' (served 1.0) has no sleep() and wake(); choose another backend" in line
    assert made("reward.manager=restless", device="cpu").colocated_roles == ()
    critic = ("critic.engine=valued", "algo.advantage=gae", "reward.manager=restful")
    assert made(*critic).colocated_roles == ("judge",)


@pytest.mark.parametrize(
    ("kind", "called"),
    [("adapter", "save_adapter"), ("tcp", "named_weights"), ("shm", "named_weights"), ("directory", "save_whole")],
)
def test_the_actor_hands_over_what_the_plan_decided(kind: str, called: str, tmp_path: Path) -> None:
    decided = {
        "adapter": (*VLLM, "actor.lora.enabled=true", "plugins.vllm.lora=adapter"),
        "tcp": (*VLLM, "rollout.weight_sync=tcp"),
        "shm": VLLM,
        "directory": (*VLLM, "rollout.weight_sync=disk"),
    }[kind]
    hooks, loaded = configure([], [*SETTINGS, "actor.backend=hf", *decided], ["null"])
    plan = make_plan(loaded, hooks, Facts(cpus=2))
    worker = next(worker for worker in plan.workers if worker.request.role.name == "actor")
    context = context_of(cluster_context(plan, tmp_path, Deadlines()), worker, 0, device="cpu")
    calls: list[str] = []
    actor = HfActor(context)
    names = ("save_adapter", "named_weights", "save_whole")

    def noting(name: str) -> "Iterator[Any]":
        calls.append(name)
        return (nothing for nothing in ())

    engine: Any = SimpleNamespace(ranks=None, **{name: lambda *_, name=name: noting(name) for name in names})
    actor.engine = engine
    try:
        assert actor.weights(3, tmp_path / "weights").kind == kind
    finally:
        if actor._server is not None:
            actor._server.close()
    assert calls == [called]
