"""The plan as JSON data."""

import json
from collections.abc import Mapping
from typing import Any

from rlcore.contracts.clusters import PoolPlan, WorkerPlan
from rlcore.contracts.components import ResolvedReward, RewardComponent
from rlcore.errors.redaction import redact
from rlcore.plan.run_plan import AlgorithmPlan, RunPlan
from rlcore.types import plain


def plan_to_json(plan: RunPlan) -> dict[str, Any]:
    """The plan as JSON values, in dicts by name so that two plans can be compared key by key.

    Contains no secrets: settings are those of the saved configuration, where `${oc.env:NAME}` is unresolved, and values
    that the plan took from resolved settings (a service's address) are redacted.
    """
    found: dict[str, Any] = plain(_to_json(plan), lambda value: redact(value) if isinstance(value, str) else value)
    return found


def _to_json(plan: RunPlan) -> dict[str, Any]:
    saved: Any = json.loads(json.dumps(plan.loaded.saved))
    functions = (saved.get("reward") or {}).get("functions") or {}
    return {
        "plugins": {
            plugin.plugin: {"distribution": plugin.distribution, "version": plugin.version} for plugin in plan.plugins
        },
        "components": {
            slot: {"name": component.component.name, "provided_by": component.provided_by}
            for slot, component in sorted(plan.components.items())
        },
        "cluster": {"name": plan.cluster.offer.name, "provided_by": plan.cluster.provided_by},
        "trackers": {tracker.offer.name: {"provided_by": tracker.provided_by} for tracker in plan.trackers},
        "prompt_order": {"name": plan.prompt_order.offer.name, "provided_by": plan.prompt_order.provided_by},
        "algorithms": {purpose: _algorithm(algorithm) for purpose, algorithm in sorted(plan.algorithms.items())},
        "workers": {worker.request.role.name: _worker(worker) for worker in plan.workers},
        "pools": {pool.name: _pool(pool) for pool in plan.pools},
        "rewards": {reward.name: _reward(reward, functions.get(reward.name) or {}) for reward in plan.rewards}
        | {component.name: _part(plan, component) for component in plan.reward_components},
        "schedule": {
            "name": plan.schedule.name,
            "max_staleness": plan.schedule.max_staleness,
            "stream": plan.schedule.stream,
            "on_stale": "drop" if plan.schedule.drop else "wait",
            "old_logprobs": plan.schedule.old_logprobs.value,
            "passes": list(plan.schedule.passes),
            "all_rows": plan.schedule.all_rows,
        },
        "arithmetic": dict(plan.batch_sizes),
        "layout": {"name": plan.layout.name, "roles": list(plan.layout.roles), "reason": plan.layout.reason},
        "colocated_roles": list(plan.colocated_roles),
        "memory_bytes": dict(plan.memory_bytes),
        "device_bytes": {name: dict(phases) for name, phases in plan.device_bytes.items()},
        "saves_copies": plan.saves_copies,
        "choices": {
            choice.key: {"value": choice.value, "reason": choice.reason, "set_by": choice.set_by}
            for choice in plan.choices
        },
        "facts": {
            "cpus": plan.facts.cpus,
            "gpus": plan.facts.gpus,
            "memory_bytes": plan.facts.memory_bytes,
            "gpu_memory_bytes": plan.facts.gpu_memory_bytes,
            "gpu_free_bytes": plan.facts.gpu_free_bytes,
            "parameters": plan.facts.parameters,
        },
        "notes": list(plan.notes),
        "config": saved,
    }


def _reward(plan: ResolvedReward, settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "target": plan.target,
        "provided_by": plan.provided_by,
        "weight": plan.weight,
        "scope": plan.scope.value,
        "deadline_s": plan.deadline_s,
        "kwargs": settings.get("kwargs") or {},
        "is_factory": plan.is_factory,
        "post_process": plan.post_process,
    }


def _algorithm(plan: AlgorithmPlan) -> dict[str, Any]:
    return {
        "name": plan.algorithm.name,
        "target": plan.algorithm.target,
        "scope": plan.algorithm.scope.value,
        "needs": sorted(need.value for need in plan.algorithm.needs),
        "provided_by": plan.provided_by,
    }


def _part(plan: RunPlan, part: RewardComponent) -> dict[str, Any]:
    return {
        "kind": part.kind,
        "served_by": plan.served_where(part),
        "provided_by": plan.components["reward"].provided_by,
        "weight": part.weight,
        "scope": part.scope.value,
        "deadline_s": part.deadline_s,
        "on_failure": part.on_failure,
    }


def _pool(plan: PoolPlan) -> dict[str, Any]:
    return {
        "gpus_per_node": plan.gpus_per_node,
        "nodes": plan.nodes,
        "roles": list(plan.roles),
        "colocates": list(plan.colocates),
        "gpus": list(plan.gpus),
        "placement": plan.placement,
        "labels": dict(plan.labels),
        "resources": dict(plan.resources),
        "provided_by": plan.provided_by,
    }


def _worker(plan: WorkerPlan) -> dict[str, Any]:
    request = plan.request
    return {
        "interface": f"{request.role.interface.__module__}.{request.role.interface.__qualname__}",
        "backend": request.backend,
        "class": f"{plan.cls.__module__}.{plan.cls.__qualname__}",
        "provided_by": plan.provided_by,
        "asked_by": plan.asked_by,
        "pool": request.pool,
        "replicas": request.replicas,
        "ranks": request.ranks,
        "dp_replicate": request.engine.dp_replicate if request.engine else 1,
        "context_parallel": request.engine.context_parallel if request.engine else 1,
        "shared_prefix": plan.shared_prefix.value,
        "skips_rows": plan.skips_rows,
        "gpus": request.gpus,
        "cpus": request.cpus,
        "device_frac": request.device_frac,
        "asleep_bytes": request.asleep_bytes,
        "threads": request.threads,
        "embedded_in": request.embedded_in.name if request.embedded_in else None,
        "isolated": request.isolated,
        "targets": dict(request.targets),
    }
