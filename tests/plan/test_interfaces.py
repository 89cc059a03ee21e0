"""Every class is checked against its interface: each member of each interface, in each way in which it can be wrong."""

import functools
from abc import ABC
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from rlcore.config.providers import Offer, Provider
from rlcore.contracts.actor import ActorWorker
from rlcore.contracts.agents import AgentLoop
from rlcore.contracts.critic import CriticEngine, CriticWorker
from rlcore.contracts.offers import WorkerClass
from rlcore.contracts.reference import ReferenceWorker
from rlcore.contracts.reward_manager import RewardManager
from rlcore.contracts.reward_replica import RewardReplica
from rlcore.contracts.rollout import RolloutWorker
from rlcore.errors import PluginError
from rlcore.errors.checks.interfaces import Kind, breaches, kind_of, not_importable, product, refuses
from rlcore.plan.requests import check_class

INTERFACES = (
    ActorWorker, ReferenceWorker, RolloutWorker, CriticWorker, RewardReplica, AgentLoop, RewardManager, CriticEngine,
)  # fmt: skip


def methods_of(interface: type[Any]) -> dict[str, Any]:
    """The public methods of an interface; the planner's own list is not used."""
    return {
        name: value
        for base in reversed(interface.__mro__[:-1])
        for name, value in vars(base).items()
        if callable(value) and not name.startswith("_") and base is not ABC
    }


def conforming(interface: type[Any], **members: Any) -> type[Any]:
    """A class that defines every method as the interface does, except for the given members."""
    return type("Mine", (interface,), {"__module__": __name__, **methods_of(interface), **members})


METHODS = [(interface, name) for interface in INTERFACES for name in methods_of(interface)]


@pytest.mark.parametrize("interface", INTERFACES)
def test_a_class_with_every_method_of_its_interface_conforms(interface: type[Any]) -> None:
    mine = conforming(interface)
    mine.__abstractmethods__ = frozenset()  # its methods are the interface's own, abstract ones included
    assert breaches(mine, interface) == ()


async def stream(self: Any, *args: Any) -> AsyncIterator[Any]:
    """An async generator that takes anything."""
    yield None


async def asynchronous(self: Any, *args: Any) -> Any:
    """A coroutine function that takes anything."""


def plain(self: Any, *args: Any) -> Any:
    """A plain function that takes anything."""


def generator(self: Any, *args: Any) -> Iterator[Any]:
    """A generator function that takes anything."""
    yield None


WRONG_KINDS: dict[Kind, tuple[Callable[..., Any], ...]] = {
    Kind.PLAIN: (stream, asynchronous, generator),
    Kind.ASYNC: (stream, plain, generator),
    Kind.STREAM: (asynchronous, generator),
}
RIGHT_KINDS = {Kind.PLAIN: plain, Kind.ASYNC: asynchronous, Kind.STREAM: stream}


@pytest.mark.parametrize(("interface", "name"), METHODS)
def test_a_method_of_another_kind_is_refused_by_name(interface: type[Any], name: str) -> None:
    due = kind_of(methods_of(interface)[name])
    for wrong in WRONG_KINDS[due]:
        found = " ".join(breaches(conforming(interface, **{name: wrong}), interface))
        assert f"{name}() is {kind_of(wrong)}; needs {due}" in found
    assert f"{name}()" not in " ".join(breaches(conforming(interface, **{name: RIGHT_KINDS[due]}), interface))


@pytest.mark.parametrize(("interface", "name"), METHODS)
@pytest.mark.parametrize("value", [None, 3, "text", property(plain)])
def test_what_is_not_a_method_is_refused_by_name(interface: type[Any], name: str, value: object) -> None:
    found = " ".join(breaches(conforming(interface, **{name: value}), interface))
    assert f"{name} is " in found
    assert "needs a method" in found


def with_parameters(kind: Kind, parameters: str) -> Any:
    """A function of that kind with those parameters."""
    start = "def" if kind is Kind.PLAIN else "async def"
    body = "yield None" if kind is Kind.STREAM else "return None"
    names: dict[str, Any] = {}
    exec(f"{start} made({parameters}):\n    {body}", names)
    return names["made"]


@pytest.mark.parametrize(("interface", "name"), METHODS)
def test_parameters_that_do_not_take_the_interface_s_are_refused(interface: type[Any], name: str) -> None:
    declared = methods_of(interface)[name]
    due = kind_of(declared)
    for parameters in ("", "self, *, surplus", "self, a, b, c, d, e, f"):
        found = " ".join(breaches(conforming(interface, **{name: with_parameters(due, parameters)}), interface))
        assert f"{name}() takes (" in found, parameters
    if declared.__code__.co_argcount > 1:
        found = " ".join(breaches(conforming(interface, **{name: with_parameters(due, "self")}), interface))
        assert f"{name}() takes (self), needs (self, " in found
    others = "self, a=1, b=2, c=3, d=4, *rest, more=None, **kwargs"  # other names and more defaults do no harm
    assert f"{name}()" not in " ".join(
        breaches(conforming(interface, **{name: with_parameters(due, others)}), interface)
    )


@pytest.mark.parametrize("interface", INTERFACES)
def test_only_real_inheritance_counts(interface: type[Any]) -> None:
    class Registered:
        """Has no method at all."""

    interface.register(Registered)
    assert issubclass(Registered, interface)
    (found,) = breaches(Registered, interface)
    assert f"does not inherit from {interface.__name__}" in found


@pytest.mark.parametrize("interface", INTERFACES)
def test_an_abstract_method_that_is_left_out_is_named(interface: type[Any]) -> None:
    class Half(interface):  # type: ignore[misc,valid-type]
        """Defines nothing."""

    (found,) = breaches(Half, interface)
    assert "it is abstract" in found
    assert all(name in found for name in interface.__abstractmethods__)  # type: ignore[attr-defined]


def test_a_property_is_due_where_the_interface_has_one() -> None:
    assert "scope is a method; needs a property or a value" in breaches(
        conforming(RewardManager, scope=plain), RewardManager
    )
    fine = breaches(conforming(RewardManager, scope="sample"), RewardManager)
    assert not any("scope" in case for case in fine)


def test_decorated_methods_are_seen_through() -> None:
    def logged(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return wrapper

    @logged
    async def start(self: Any) -> None: ...

    @logged
    async def close(self: Any, how: str) -> None: ...

    found = " ".join(breaches(conforming(AgentLoop, start=start, close=close), AgentLoop))
    assert "start" not in found
    assert "close() takes (self: Any, how: str) -> None, needs (self): missing a required argument: 'how'" in found


def test_static_and_class_methods_bind_as_they_will_be_called() -> None:
    def none() -> dict[str, float]:
        return {}

    found = " ".join(breaches(conforming(AgentLoop, metrics=staticmethod(none), state=classmethod(plain)), AgentLoop))
    assert "metrics" not in found
    assert "state" not in found
    found = " ".join(breaches(conforming(AgentLoop, restore=staticmethod(none)), AgentLoop))
    assert "restore() takes () -> dict[str, float], needs (state)" in found


def test_an_async_iterator_may_be_returned_by_a_plain_function() -> None:
    assert not any("rollout" in breach for breach in breaches(conforming(AgentLoop, rollout=plain), AgentLoop))


PROVIDER = Provider("mine", "mine", "1.0")


def test_a_worker_class_is_made_of_a_context_alone() -> None:
    class Odd(RolloutWorker):
        def __init__(self, context: Any, model: str) -> None:
            super().__init__(context)

        def setup(self) -> None: ...

        async def generate(self, requests: Any) -> AsyncIterator[Any]:
            yield None

    with pytest.raises(PluginError, match=r"plugin 'mine'.*Odd as RolloutWorker for backend 'odd'.*__init__\(\) takes"):
        check_class(Offer(WorkerClass(RolloutWorker, "odd", Odd), PROVIDER))


def test_classes_that_another_process_cannot_import_are_seen() -> None:
    class Local:
        """Here and nowhere else."""

    assert "inside a function" in not_importable(Local)
    script = type("Mine", (), {"__module__": "__main__", "__qualname__": "Mine"})
    assert "put it into a module" in not_importable(script)
    renamed = type("Mine", (), {"__module__": __name__, "__qualname__": "AnyName"})
    assert "is not what" in not_importable(renamed)
    assert not_importable(Provider) == ""


def test_what_a_component_builds_is_known_where_it_is_said() -> None:
    def annotated(context: Any) -> "Provider": ...  # type: ignore[empty-body]

    def silent(context): ...  # type: ignore[no-untyped-def]

    def unknown(context: Any) -> "NoSuchName": ...  # type: ignore[name-defined]  # noqa: F821

    assert [product(value) for value in (Provider, annotated, functools.partial(annotated, 1))] == [Provider] * 3
    assert [product(value) for value in (silent, unknown, lambda context: None)] == [None] * 3


def test_a_function_without_a_signature_is_not_judged() -> None:
    assert refuses(dict, ["a"]) == ""
    assert "needs (a, b)" in refuses(lambda a: None, ["a", "b"])


SLIPS = ("sav_e", "Save", "svae", "sae", "savve", "asave")
OTHER_WORDS = ("wave", "saves", "sav", "keep", "resaved", "_svae")


class Critic(CriticWorker):
    """A critic without `save`, to which tests add methods."""


@pytest.mark.parametrize("name", SLIPS)
def test_a_method_that_is_one_slip_away_from_an_optional_one_is_refused(name: str) -> None:
    mine = type("Mine", (Critic,), {name: asynchronous})
    clause = (
        f"it defines {name}(), which nothing calls, and not save(); rename it, or begin its name with an underscore"
    )
    assert clause in breaches(mine, CriticWorker)
    below = type("Below", (mine,), {})
    assert clause in breaches(below, CriticWorker)


@pytest.mark.parametrize("name", OTHER_WORDS)
def test_methods_with_other_names_are_not_taken_for_slips(name: str) -> None:
    mine = type("Mine", (Critic,), {name: asynchronous})
    assert breaches(mine, CriticWorker) == breaches(Critic, CriticWorker)


def test_a_nearby_name_is_allowed_where_the_method_itself_is_defined_or_comes_from_elsewhere() -> None:
    save = CriticWorker.save
    both = type("Both", (Critic,), {"asave": asynchronous, "save": lambda self, *args: save(self, *args)})
    assert "asave" not in "".join(breaches(both, CriticWorker))
    mixin = type("Mixin", (), {"asave": asynchronous})
    assert "asave" not in "".join(breaches(type("Mixed", (mixin, Critic), {}), CriticWorker))
