"""Collects requests for workers and picks the class of each role."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from rlcore.config import LoadedConfig, RunConfig
from rlcore.config.providers import Offer
from rlcore.contracts.clusters import ClusterAbilities, ProcessUse, WorkerPlan, needs_process
from rlcore.contracts.offers import WorkerClass
from rlcore.contracts.requests import Role, WorkerRequest
from rlcore.errors import CALLED, PlanError, PluginError, boundary, nearest, shown
from rlcore.errors.checks.data import listed
from rlcore.errors.checks.interfaces import breaches, not_importable, refuses
from rlcore.errors.checks.targets import static_problem
from rlcore.plan.catalog import remedy
from rlcore.plan.components import section_of
from rlcore.plan.planner_input import CORE, Offers, by_provider, join_names
from rlcore.plan.run_plan import ComponentPlan
from rlcore.plan.time_limit import limited


@dataclass(frozen=True)
class OwnedRequest:
    """A request with the party that made it."""

    request: WorkerRequest
    by: str


def gather(
    config: RunConfig,
    offers: Offers,
    components: Mapping[str, ComponentPlan],
    targets: Mapping[str, str],
) -> tuple[OwnedRequest, ...]:
    """The requests of the core and of all chosen components; each role has one owner."""
    owned_requests = [OwnedRequest(request, CORE) for request in offers.core_requests(config, targets)]
    for slot, plan in sorted(components.items()):
        who = f"{slot} '{plan.component.name}' of {plan.provided_by}"
        whose = f"{who}: requests()"
        with boundary(whose, PluginError, CALLED), limited(whose):
            requests = plan.component.requests(config, plan.section)
        owned_requests += [OwnedRequest(request, who) for request in listed(requests, WorkerRequest, whose)]
    for owned in owned_requests:
        _check_targets(owned)
    owners: dict[str, OwnedRequest] = {}
    for worker in owned_requests:
        name = worker.request.role.name
        if name in owners:
            raise PlanError(
                f"role '{name}' has two owners: {join_names([owners[name].by, worker.by])}; a role has one, "
                f"so one of them has to ask for a role of another name"
            )
        owners[name] = worker
    return tuple(owned_requests)


def _check_targets(owned: OwnedRequest) -> None:
    """PluginError if a function that a worker has to call certainly does not exist."""
    for purpose, target in owned.request.targets.items():
        problem = static_problem(target)
        if problem:
            role = f"role '{owned.request.role.name}' of {owned.by}"
            raise PluginError(f"{role}: its target for '{purpose}', '{target}': {problem}")


FIXED = ("role", "backend", "targets", "isolated")
"""Fields of a request that the class which serves it cannot change."""


def choose_classes(
    loaded: LoadedConfig, offers: Offers, owned_requests: Sequence[OwnedRequest]
) -> tuple[WorkerPlan, ...]:
    """A class for each request, in start order: by role name, embedded workers after their host."""
    config, reasons = loaded.config, {choice.key: choice.reason for choice in loaded.choices if not choice.set_by}
    plans = {owned.request.role.name: _fill(config, offers, owned) for owned in owned_requests}
    everywhere = {owned.request.role.name for owned in owned_requests if _only_class(offers, owned).value.on_every_rank}
    for name in sorted(plans):
        plans[name] = _with_host(plans[name], plans, everywhere, offers, reasons)
    inside = [name for name in sorted(plans) if plans[name].request.embedded_in is not None]
    return tuple(plans[name] for name in sorted(set(plans) - set(inside)) + inside)


def _fill(config: RunConfig, offers: Offers, owned: OwnedRequest) -> WorkerPlan:
    request = owned.request
    offer = _only_class(offers, owned)
    check_class(offer)
    embedded = offer.value.embedded_in
    if embedded is not None and request.embedded_in not in (None, embedded):
        raise PlanError(
            f"{_who(owned)}: asked for inside '{_name(request.embedded_in)}', "
            f"but {_class(offer)} is served inside '{embedded.name}'"
        )
    if embedded is not None:
        request = replace(request, embedded_in=embedded)
    elif offer.value.isolated:
        request = replace(request, isolated=True)
    section = section_of(config, offers, offer.provider)
    request = _completed(config, section, offer, OwnedRequest(request, owned.by))
    return WorkerPlan(
        request,
        offer.value.cls,
        owned.by,
        str(offer.provider),
        section,
        weight_sync=offer.value.weight_sync,
        keeps_cache=offer.value.keeps_cache,
        context_parallel=offer.value.context_parallel,
    )


def _completed(config: RunConfig, section: Any, offer: Offer[WorkerClass], owned: OwnedRequest) -> WorkerRequest:
    """The request, completed by the offer.

    PluginError if `complete` fails or returns a different request; PlanError if it changes the requested pool.
    """
    before = owned.request
    who = f"{offer.provider}: complete() of {_class(offer)} for role '{before.role.name}'"
    with boundary(who, PluginError, CALLED), limited(who):
        request = offer.value.complete(config, section, before)
    if not isinstance(request, WorkerRequest):
        raise PluginError(f"{who}: returned {shown(request)}; needs the WorkerRequest that it was given, completed")
    fixed = (
        FIXED if before.embedded_in is None else (*FIXED, "embedded_in")
    )  # a class may choose a host if the request names none
    for name in fixed:
        if getattr(request, name) != getattr(before, name):
            raise PluginError(
                f"{who}: changed {name} from {shown(getattr(before, name))} to {shown(getattr(request, name))}; it may "
                "state resources only"
            )
    if before.pool not in (WorkerRequest.pool, request.pool):
        raise PlanError(
            f"role '{before.role.name}' of {owned.by} asks for pool '{before.pool}', but {_class(offer)} of "
            f"{offer.provider} states pool '{request.pool}'; needs one pool: leave it out where it is asked for, or "
            "choose another backend"
        )
    return request


def _only_class(offers: Offers, owned: OwnedRequest) -> Offer[WorkerClass]:
    """The one offer with the requested (interface, backend), matched by identity; subclasses are not searched."""
    role, backend = owned.request.role, owned.request.backend
    for_interface = [offer for offer in offers.worker_classes() if offer.value.interface is role.interface]
    found = [offer for offer in for_interface if offer.value.backend == backend]
    if len(found) == 1:
        return found[0]
    interface = role.interface.__name__
    wanted = f"{_who(owned)} needs {'an' if interface[0] in 'AEIOU' else 'a'} {interface} for backend '{backend}'"
    if found:
        raise PlanError(
            f"{wanted}: {len(found)} are offered, "
            f"{join_names([f'{_class(offer)} by {offer.provider}' for offer in found])}; "
            f"enable one of these plugins only, or choose another backend"
        )
    others = sorted((o for o in offers.worker_classes() if o.value.backend == backend), key=by_provider)
    elsewhere = "; ".join(
        f"{other.provider} offers backend '{backend}' for {other.value.interface.__name__}, which is another interface"
        for other in others
        if other.provider.plugin != CORE
    )
    absent = offers.not_enabled(f"{interface} for backend {backend}")
    help_ = remedy(f"{owned.request.settings or role.name}.backend", backend, interface, absent)
    parts = [f"{wanted}: none is offered", nearest(backend, [offer.value.backend for offer in for_interface])]
    raise PlanError("; ".join(parts + [part for part in (elsewhere, help_) if part]))


def check_class(offer: Offer[WorkerClass]) -> None:
    """PluginError unless the class implements its interface and is constructed from a context alone."""
    offered = offer.value
    with boundary(f"{offer.provider}: looking at {_class(offer)}", PluginError, CALLED):
        found = list(breaches(offered.cls, offered.interface))
        if not found and (problem := refuses(offered.cls, ["context"])):
            found.append(f"__init__() {problem}")
    if found:
        raise PluginError(
            f"{offer.provider}: offers {_class(offer)} as {offered.interface.__name__} for backend "
            f"'{offered.backend}', but {'; '.join(found)}"
        )


def check_shipped(plans: Sequence[WorkerPlan], config: RunConfig, abilities: ClusterAbilities) -> None:
    """PlanError for a class that another process has to import but cannot."""
    processes = {plan.request.role.name for plan in plans if _has_processes(plan, config, abilities)}
    for plan in plans:
        inside = plan.request.embedded_in.name if plan.request.embedded_in else ""
        problem = not_importable(plan.cls) if {plan.request.role.name, inside} & processes else ""
        if problem:
            raise PlanError(
                f"role '{plan.request.role.name}' of {plan.asked_by} runs in a process, where class "
                f"{plan.cls.__module__}.{plan.cls.__qualname__} of {plan.provided_by} is imported by name; it {problem}"
            )


def _has_processes(plan: WorkerPlan, config: RunConfig, abilities: ClusterAbilities) -> bool:
    if abilities.processes is not ProcessUse.REQUIRED:
        return abilities.processes is ProcessUse.ALL
    return needs_process(plan.request, config)


def _with_host(
    plan: WorkerPlan, plans: Mapping[str, WorkerPlan], everywhere: Set[str], offers: Offers, reasons: Mapping[str, str]
) -> WorkerPlan:
    """The plan with its host's pool if it is embedded; in each rank of the host, if the class supports that."""
    request = plan.request
    if request.embedded_in is None:
        return plan
    who = f"role '{request.role.name}' of {plan.asked_by}"
    host = plans.get(request.embedded_in.name)
    if host is None or host.request.role != request.embedded_in:
        raise PlanError(
            f"{who} is served inside role '{request.embedded_in.name}' ({request.embedded_in.interface.__name__}), "
            f"which was not asked for; roles of this run: {', '.join(sorted(plans))}"
        )
    if host.request.embedded_in is not None:
        raise PlanError(
            f"{who} is served inside '{request.embedded_in.name}', which is itself served inside another role"
        )
    if host.request.backend != request.backend:
        raise PlanError(
            f"{who}: backend '{request.backend}' is served inside '{request.embedded_in.name}' of the same backend, "
            f"but {request.embedded_in.name}.backend={host.request.backend}; make the two equal"
        )
    served_in = request.embedded_in.name
    if request.role.name in everywhere and request.ranks == 1:
        request = replace(request, ranks=host.request.ranks)
    elif host.request.ranks > 1:
        raise PlanError(
            f"{who}: backend '{request.backend}' is served inside '{served_in}', which is sharded over "
            f"{host.request.ranks} ranks; it needs one rank{_instead(plan, host.request.role, offers)}"
        )
    if request.isolated or request.replicas != host.request.replicas or request.ranks != host.request.ranks:
        raise PlanError(
            f"{who} is served inside '{served_in}', so it cannot be isolated and has as many replicas "
            f"and ranks ({host.request.replicas} x {host.request.ranks}){_why_inside(request, reasons)}"
        )
    pool = WorkerRequest.pool
    if request.pool not in (pool, host.request.pool):
        raise PlanError(f"{who} asks for pool '{request.pool}', but its host is in pool '{host.request.pool}'")
    return replace(plan, request=replace(request, pool=host.request.pool))


def _why_inside(request: WorkerRequest, reasons: Mapping[str, str]) -> str:
    """The end of an error: why a backend that is embedded was chosen, if the user did not name it."""
    key = f"{request.settings or request.role.name}.backend"
    reason = reasons.get(key, "")
    return (
        f"; {key}={request.backend} was chosen because {reason}; set {key}, or leave the replicas out" if reason else ""
    )


def _instead(plan: WorkerPlan, host: Role[Any], offers: Offers) -> str:
    """The end of an error: the role's backends that support a host of several ranks."""
    role = plan.request.role
    fits = [offer.value for offer in offers.worker_classes() if offer.value.interface is role.interface]
    names = sorted(
        worker_class.backend for worker_class in fits if worker_class.embedded_in is None or worker_class.on_every_rank
    )
    choices = ", ".join(f"{plan.request.settings or role.name}.backend={name}" for name in names)
    return f"; choose from: {choices}" if names else f"; set {host.name}.ranks=1"


def _who(owned: OwnedRequest) -> str:
    return f"role '{owned.request.role.name}' (asked by {owned.by})"


def _class(offer: Offer[WorkerClass]) -> str:
    return f"{offer.value.cls.__module__}.{offer.value.cls.__qualname__}"


def _name(role: "Role[Any] | None") -> str:
    return role.name if role else "nothing"
