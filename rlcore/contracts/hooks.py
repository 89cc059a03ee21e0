"""All hooks of rlcore.

Hooks only declare: each returns a list of offers. The lists of all enabled plugins count, and the order of plugins has
no effect. Hooks run once, before any process starts. A plugin is a module with functions of these names, marked
`hookimpl`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from rlcore.config import RunConfig
    from rlcore.config.providers import ConfigSection
    from rlcore.contracts.agents import AgentLoop
    from rlcore.contracts.clusters import ClusterOffer
    from rlcore.contracts.components import Component
    from rlcore.contracts.critic import CriticEngine
    from rlcore.contracts.offers import Algorithm, PoolSpec, RewardFunction, WorkerClass
    from rlcore.contracts.prompt_orders import PromptOrderOffer
    from rlcore.contracts.requests import WorkerRequest
    from rlcore.contracts.reward_manager import RewardManager
    from rlcore.contracts.tracking import TrackerOffer

hookspec = pluggy.HookspecMarker("rlcore")
hookimpl = pluggy.HookimplMarker("rlcore")
"""Decorates functions of a plugin that implement hooks of rlcore."""


@hookspec
def rlcore_config_sections() -> "Sequence[ConfigSection]":  # type: ignore[empty-body]
    """Settings sections: a frozen dataclass for `plugins.<name>`, and defaults of the main configuration.

    rlcore calls this hook first, before it reads the configuration.
    """


@hookspec
def rlcore_reward_functions() -> "Sequence[RewardFunction]":  # type: ignore[empty-body]
    """Reward functions by target; `reward.functions.<x>.fn` names one."""


@hookspec
def rlcore_reward_managers() -> "Sequence[Component[RewardManager]]":  # type: ignore[empty-body]
    """Reward managers; `reward.manager` names one."""


@hookspec
def rlcore_critic_engines() -> "Sequence[Component[CriticEngine]]":  # type: ignore[empty-body]
    """Critic engines; `critic.engine` names one."""


@hookspec
def rlcore_agent_loops() -> "Sequence[Component[AgentLoop]]":  # type: ignore[empty-body]
    """Agent loops; `rollout.agent` names one."""


@hookspec
def rlcore_algorithms() -> "Sequence[Algorithm]":  # type: ignore[empty-body]
    """Advantage estimators and policy losses; `algo.advantage` and `algo.policy_loss` name them."""


@hookspec
def rlcore_resource_pools(config: "RunConfig", requests: "tuple[WorkerRequest, ...]") -> "Sequence[PoolSpec]":  # type: ignore[empty-body]
    """Device pools for the roles of this run, given the requests of all components.

    Offer a pool only for your plugin's roles: a pool that no role uses is an error.
    """


@hookspec
def rlcore_worker_classes() -> "Sequence[WorkerClass]":  # type: ignore[empty-body]
    """Worker classes, each for one (interface, backend) pair; the planner picks the requested one."""


@hookspec
def rlcore_clusters() -> "Sequence[ClusterOffer]":  # type: ignore[empty-body]
    """Clusters, which start the workers of a run; `cluster.backend` names one."""


@hookspec
def rlcore_trackers() -> "Sequence[TrackerOffer]":  # type: ignore[empty-body]
    """Trackers, which get the metrics of a run in addition to its files; `track.to` names some."""


@hookspec
def rlcore_prompt_orders() -> "Sequence[PromptOrderOffer]":  # type: ignore[empty-body]
    """Orders of the training prompts; `data.order` names one."""


HOOK_NAMES: tuple[str, ...] = tuple(name for name in dict(globals()) if name.startswith("rlcore_"))
