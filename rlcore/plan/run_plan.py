"""The planner's decisions: every part of a `RunPlan`. Plain frozen data, created only by `rlcore.plan`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Literal

from rlcore.config import LoadedConfig, RunConfig
from rlcore.config.choices import Choice
from rlcore.config.providers import Provider
from rlcore.contracts.actor import ACTOR
from rlcore.contracts.clusters import ClusterAbilities, ClusterOffer, PoolPlan, WorkerPlan
from rlcore.contracts.components import Component, ResolvedReward, RewardComponent
from rlcore.contracts.offers import Algorithm
from rlcore.contracts.prompt_orders import PromptOrderOffer
from rlcore.contracts.rollout import ROLLOUT
from rlcore.contracts.tracking import TrackerOffer
from rlcore.errors import counted
from rlcore.plan.machine_facts import Facts


@dataclass(frozen=True)
class ComponentPlan:
    """A slot of the run with the component that fills it."""

    slot: str
    component: Component[Any]
    provided_by: str
    section: Any = None


@dataclass(frozen=True)
class ClusterPlan:
    """The cluster that starts the run's workers."""

    offer: ClusterOffer
    provided_by: str
    section: Any
    abilities: ClusterAbilities
    """The cluster's abilities with the settings of this run."""


@dataclass(frozen=True)
class AlgorithmPlan:
    """An advantage estimator or policy loss of the run."""

    algorithm: Algorithm
    provided_by: str


@dataclass(frozen=True)
class TrackerPlan:
    """A tracker of the run."""

    offer: TrackerOffer
    provided_by: str
    section: Any = None


@dataclass(frozen=True)
class PromptOrderPlan:
    """The order of the run's training prompts."""

    offer: PromptOrderOffer
    provided_by: str
    section: Any = None


WeightsKind = Literal["", "directory", "adapter", "tcp", "shm", "nccl", "ipc"]
"""A `WeightsHandle.kind`; '' where the rollout samples from the actor's own weights."""


class OldLogprobs(StrEnum):
    """The source of pi_old's log-probs."""

    DETACHED = "the update itself"
    """A step is one update, so pi_old is the policy that is being updated, detached."""
    SAMPLED = "as sampled"
    """The log-probs that were recorded when the tokens were sampled."""
    PASS = "a forward pass"
    """A pass with the weights at the start of the step, before the first update."""


@dataclass(frozen=True)
class SchedulePlan:
    """The planned overlap of sampling, rewards and updates."""

    name: str
    """In words, such as 'one-step off-policy'."""
    max_staleness: int
    stream: bool
    """True if mini-batches are formed from groups as their rewards arrive."""
    drop: bool
    """True if prompts that are too old are discarded instead of waited for."""
    old_logprobs: OldLogprobs
    passes: tuple[str, ...]
    """Forward passes of a step that do not need rewards: 'reference', 'old log-probs', 'values'."""
    embedded: bool
    """True if generation reads the same weights that updates change."""
    all_rows: str = ""
    """Reason why updates also compute rows whose advantages are all 0; empty if they skip them."""

    @property
    def sample_before_update(self) -> bool:
        """True if every issued prompt is sampled to its end before a step's first update."""
        return self.embedded and self.max_staleness <= 1

    @property
    def sample_before_publish(self) -> bool:
        """True if every issued prompt is sampled to its end before weights are handed over, so no sample mixes
        versions."""
        return self.max_staleness <= 1


@dataclass(frozen=True)
class LayoutPlan:
    """Devices of the roles that serve."""

    name: Literal["", "colocated", "split"]
    """The layout; '' if no serving role has a device."""
    roles: tuple[str, ...]
    """Roles on the actor's devices."""
    reason: str


@dataclass(frozen=True)
class RunPlan:
    """The whole run, decided: `launch` starts exactly this. Only `rlcore.plan.make_plan` constructs it."""

    loaded: LoadedConfig
    facts: Facts
    components: Mapping[str, ComponentPlan]
    """By slot: 'agent', 'reward', 'critic'."""
    cluster: ClusterPlan
    workers: tuple[WorkerPlan, ...]
    """In start order; embedded workers follow their host."""
    pools: tuple[PoolPlan, ...]
    layout: LayoutPlan
    """Decided by `cluster.layout` or by the pools that the user declared."""
    colocated_roles: tuple[str, ...]
    """Roles that share the devices of the actor's pool and sleep while it trains."""
    weights_kind: WeightsKind
    """The way in which the actor hands its weights to the rollout."""
    algorithms: Mapping[str, AlgorithmPlan]
    """By purpose: 'advantage', 'policy_loss'."""
    trackers: tuple[TrackerPlan, ...]
    """In the order of `track.to`."""
    prompt_order: PromptOrderPlan
    rewards: tuple[ResolvedReward, ...]
    reward_components: tuple[RewardComponent, ...]
    """Components of the reward manager, in addition to `rewards`."""
    schedule: SchedulePlan
    """The overlap of phases."""
    batch_sizes: Mapping[str, int]
    """Prompts, samples, mini-batches and updates per step."""
    memory_bytes: Mapping[str, int]
    """Estimate for one rank of each role that `rlcore.plan.memory` can estimate; empty if nothing is known."""
    device_bytes: Mapping[str, Mapping[str, int]]
    """Bytes on the fullest device of each pool, by pool and phase; empty if nothing is known."""
    choices: tuple[Choice, ...]
    """The keys whose defaults depend on the machine, with their values and the reasons."""
    notes: tuple[str, ...]
    """Notes for the user: unused offers, unknown facts, a missing canary."""
    plugins: tuple[Provider, ...]
    """The enabled plugins."""
    saves_copies: bool = True
    """True if checkpoints are written from copies in host memory while training continues; else training waits."""

    @property
    def config(self) -> RunConfig:
        """The resolved configuration."""
        return self.loaded.config

    @property
    def weight_sync(self) -> str:
        """The way of weight sync, also where `rollout.weight_sync` leaves it to the plan."""
        kind = self.weights_kind
        return "disk" if kind in ("", "directory", "adapter") else kind

    def only_sampling(self) -> RunPlan:
        """The worker that samples with the actor's weights; neither a component nor a worker that serves one."""
        workers = tuple(worker for worker in self.workers if worker.request.role in (ACTOR, ROLLOUT))
        used = {worker.request.pool for worker in workers}
        used |= {member for pool in self.pools if pool.name in used for member in pool.colocates}
        roles = tuple(role for role in self.colocated_roles if role == ROLLOUT.name)
        pools = tuple(pool for pool in self.pools if pool.name in used)
        return replace(self, components={}, workers=workers, pools=pools, colocated_roles=roles)

    def served_where(self, part: RewardComponent) -> str:
        """Text for people: the address, or the role with its replicas and its pool."""
        for request in (worker.request for worker in self.workers):
            if request.role.name == part.served_by:
                many = counted(request.replicas, "replica")
                return f"role '{part.served_by}', {many} in pool '{request.pool}'"
        return part.served_by
