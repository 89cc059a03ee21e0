"""Calls the hooks of every enabled plugin, one by one, and checks what pluggy does not check."""

import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import pluggy

from rlcore.config import RunConfig
from rlcore.config.providers import ConfigSection, Offer, Provider
from rlcore.contracts import hooks as hookspecs
from rlcore.contracts.agents import AgentLoop
from rlcore.contracts.clusters import ClusterOffer
from rlcore.contracts.components import Component
from rlcore.contracts.critic import CriticEngine
from rlcore.contracts.hooks import HOOK_NAMES
from rlcore.contracts.offers import Algorithm, PoolSpec, RewardFunction, WorkerClass
from rlcore.contracts.prompt_orders import PromptOrderOffer
from rlcore.contracts.requests import WorkerRequest
from rlcore.contracts.reward_manager import RewardManager
from rlcore.contracts.tracking import TrackerOffer
from rlcore.errors import CALLED, PluginError, boundary, nearest
from rlcore.errors.checks.data import listed
from rlcore.errors.checks.interfaces import check_product, product
from rlcore.errors.redaction import displayable
from rlcore.plan import CORE
from rlcore.plan.time_limit import limited
from rlcore.plugins import builtin
from rlcore.plugins.catalogue import read_catalogue
from rlcore.plugins.discover import entry_point_rewards, installed, rewards_of
from rlcore.plugins.enabled import LoadedPlugin

T = TypeVar("T")

TRACE = "RLCORE_TRACE_PLUGINS"
"""Set this environment variable to 1 to see every hook call on stderr."""


class Hooks:
    """The offers of the core and of the given plugins; every hook runs once. The order of plugins does not matter."""

    def __init__(self, plugins: Sequence[LoadedPlugin]) -> None:
        everything = [LoadedPlugin(builtin.PROVIDER, builtin), *plugins]
        self._manager = pluggy.PluginManager("rlcore")
        self._manager.add_hookspecs(hookspecs)
        self._providers: dict[str, Provider] = {}
        self._known: dict[str, tuple[Offer[Any], ...]] = {}
        for plugin in sorted(
            everything, key=lambda parameter: (parameter.provider.plugin != CORE, parameter.provider.plugin)
        ):
            self._register(plugin)

    def _register(self, plugin: LoadedPlugin) -> None:
        provider = plugin.provider
        if provider.plugin in self._providers:
            other = self._providers[provider.plugin]
            raise PluginError(f"two plugins of one name: {other} and {provider}; leave one of them out")
        with boundary(str(provider), PluginError, CALLED):  # reading attributes may run the module's code
            check_module(plugin)
            self._manager.register(plugin.module, name=provider.plugin)
        self._providers[provider.plugin] = provider

    def providers(self) -> tuple[Provider, ...]:
        return tuple(provider for name, provider in self._providers.items() if name != CORE)

    def implemented(self, provider: Provider) -> tuple[str, ...]:
        """The hooks that a plugin implements."""
        callers = self._manager.get_hookcallers(self._manager.get_plugin(provider.plugin))
        return tuple(sorted(caller.name for caller in callers or ()))

    def config_sections(self) -> tuple[Offer[ConfigSection], ...]:
        return self._offers("rlcore_config_sections", ConfigSection, _check_section)

    def reward_functions(self) -> tuple[Offer[RewardFunction], ...]:
        return self._offers("rlcore_reward_functions", RewardFunction, _check_nothing)

    def reward_managers(self) -> tuple[Offer[Component[Any]], ...]:
        return self._offers("rlcore_reward_managers", Component, partial(_check_component, RewardManager))

    def critic_engines(self) -> tuple[Offer[Component[Any]], ...]:
        return self._offers("rlcore_critic_engines", Component, partial(_check_component, CriticEngine))

    def agent_loops(self) -> tuple[Offer[Component[Any]], ...]:
        return self._offers("rlcore_agent_loops", Component, partial(_check_component, AgentLoop))

    def algorithms(self) -> tuple[Offer[Algorithm], ...]:
        return self._offers("rlcore_algorithms", Algorithm, _check_nothing)

    def worker_classes(self) -> tuple[Offer[WorkerClass], ...]:
        return self._offers("rlcore_worker_classes", WorkerClass, _check_nothing)

    def clusters(self) -> tuple[Offer[ClusterOffer], ...]:
        return self._offers("rlcore_clusters", ClusterOffer, _check_nothing)

    def trackers(self) -> tuple[Offer[TrackerOffer], ...]:
        return self._offers("rlcore_trackers", TrackerOffer, _check_nothing)

    def prompt_orders(self) -> tuple[Offer[PromptOrderOffer], ...]:
        return self._offers("rlcore_prompt_orders", PromptOrderOffer, _check_nothing)

    def resource_pools(self, config: RunConfig, requests: tuple[WorkerRequest, ...]) -> tuple[Offer[PoolSpec], ...]:
        arguments = {"config": config, "requests": requests}
        return self._call("rlcore_resource_pools", PoolSpec, _check_nothing, arguments)

    def entry_point_rewards(self) -> tuple[Offer[RewardFunction], ...]:
        return entry_point_rewards()

    def rewards_of(self, provider: Provider) -> tuple[Offer[RewardFunction], ...]:
        """The entry points of the group `rlcore.rewards` of a plugin's distribution."""
        return rewards_of(provider.distribution)

    def not_enabled(self, offer: str) -> tuple[Provider, ...]:
        known = {entry.distribution: entry.offers for entry in read_catalogue()}
        found = (plugin for plugin in installed() if plugin.name not in self._providers)
        return tuple(
            plugin.provider
            for plugin in found
            if plugin.provider.distribution != builtin.PROVIDER.distribution
            and offer in known.get(plugin.provider.distribution, (offer,))
        )

    def core_requests(self, config: RunConfig, references: Mapping[str, str]) -> Sequence[WorkerRequest]:
        return builtin.core_requests(config, references)

    def _offers(self, hook: str, kind: type[T], check: Callable[[Provider, Any], None]) -> tuple[Offer[T], ...]:
        if hook not in self._known:
            self._known[hook] = self._call(hook, kind, check, {})
        return self._known[hook]

    def _call(
        self, hook: str, kind: type[T], check: Callable[[Provider, Any], None], arguments: Mapping[str, Any]
    ) -> tuple[Offer[T], ...]:
        offers: list[Offer[T]] = []
        implementations = getattr(self._manager.hook, hook).get_hookimpls()
        for implementation in sorted(
            implementations, key=lambda implementation: (implementation.plugin_name != CORE, implementation.plugin_name)
        ):
            provider = self._providers[implementation.plugin_name]
            whose = f"{provider}: {hook}()"
            with boundary(whose, PluginError, CALLED), limited(whose):
                function = implementation.function  # `argnames` lacks those with a default
                result = function(*[arguments[name] for name in inspect.signature(function).parameters])
                _trace(provider, hook, result)
            for offer in listed(result, kind, whose):
                check(provider, offer)
                offers.append(Offer(offer, provider))
        return tuple(offers)


def check_module(plugin: LoadedPlugin) -> None:
    """PluginError for unmarked, unknown and wrapping hook functions, which pluggy overlooks or reports badly."""
    for name, value in vars(plugin.module).items():
        options = getattr(value, "rlcore_impl", None)
        if options is None:
            if name.startswith("rlcore_") and callable(value):
                raise PluginError(
                    f"{plugin.provider}: function {name} lacks the marker; needs @rlcore.hookimpl if it is a hook, "
                    f"or a name without 'rlcore_'"
                )
            continue
        hook = options.get("specname") or name
        if hook not in HOOK_NAMES:
            raise PluginError(f"{plugin.provider}: there is no hook {hook}; {nearest(hook, HOOK_NAMES)}")
        if options.get("wrapper") or options.get("hookwrapper"):
            raise PluginError(f"{plugin.provider}: {hook} is a wrapper; needs a function that returns a list")
        _check_arguments(plugin.provider, hook, value)


def _check_arguments(provider: Provider, hook: str, function: Callable[..., Any]) -> None:
    names = tuple(inspect.signature(getattr(hookspecs, hook)).parameters)
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name not in names or parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
            choices = nearest(parameter.name, names) if names else "it is called without arguments"
            raise PluginError(
                f"{provider}: {hook} has the argument '{parameter.name}', which it is not given; {choices}"
            )


def _trace(provider: Provider, hook: str, result: object) -> None:
    if os.environ.get(TRACE) == "1":
        sys.stderr.write(displayable(f"rlcore: {hook}() of {provider} -> {result!r}\n"))


def _check_nothing(provider: Provider, item: Any) -> None:
    return None


def _check_section(provider: Provider, section: ConfigSection) -> None:
    if provider.plugin != CORE and section.name != provider.plugin:
        raise PluginError(
            f"{provider}: its config section is named '{section.name}'; needs the plugin's name '{provider.plugin}'"
        )


def _check_component(interface: type[Any], provider: Provider, component: Component[Any]) -> None:
    built = product(component.build)
    if built is not None and built not in interface.__mro__:  # annotated as the interface: `launch` checks
        check_product(built, interface, f"{provider}: component '{component.name}'")
