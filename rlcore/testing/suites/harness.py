"""The base of every suite: checks, which are methods that pytest collects, and the objects that they test."""

import asyncio
import inspect
import json
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from rlcore.cluster.child import ChildProcesses
from rlcore.contracts.components import BuildContext
from rlcore.contracts.requests import Role
from rlcore.contracts.workers import WorkerGroup
from rlcore.errors import CheckpointError, PluginError, RlcoreError, boundary
from rlcore.errors.checks.interfaces import breaches
from rlcore.imports import import_target
from rlcore.plugins import configure
from rlcore.plugins.enabled import name_of
from rlcore.testing.here import HereChildren
from rlcore.testing.leaks import leaks
from rlcore.testing.rewards import WAIT_S, reward_context
from rlcore.testing.suites.bench import Bench
from rlcore.train.checkpoint import refuse_odd_keys
from rlcore.types import Metrics

C = TypeVar("C", bound=Callable[..., None])
T = TypeVar("T")

SETTINGS: Mapping[str, Any] = {
    "model.path": "none",
    "model.tokenizer": "bytes",
    "data.sources.test.path": "prompts.jsonl",
    "reward.functions.letters.fn": "rlcore.testing.letters:count_letter",
    "reward.functions.letters.children": 1,
    "cluster.threads": 1,
}
"""The configuration of every suite; the settings of a suite take precedence."""


class Breach(AssertionError):
    """A contract is broken; the message names the target, what was found and what is needed."""


def need(holds: bool, message: str) -> None:
    """Raise `Breach` unless it holds."""
    if not holds:
        raise Breach(message)


def extra(claim: str) -> Callable[[C], C]:
    """Marks a check that runs only if the suite's attribute `claim` is set."""

    def mark(check: C) -> C:
        check.__dict__["claim"] = claim
        return check

    return mark


class Suite:
    """The checks of one kind of offer: subclass it as `class TestMine(...)`, set `target`, and pytest runs them.

    Checks marked `extra` run if their attribute is set.
    """

    target: Any = ""
    """'module:attr', '/file.py:attr', or the object itself."""
    plugins: Sequence[str] = ()
    """Plugins whose settings are needed, by name or path. The target is built with the section of the first one."""
    settings: Mapping[str, Any] = {}
    """The configuration, by dotted key."""
    defaults: Mapping[str, Any] = {}
    """Settings of the suite itself; `settings` take precedence."""
    _own_checks: ClassVar[Mapping[str, Any]] = {}
    """The checks that the class itself defines, including unclaimed ones."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._own_checks = {name: member for name, member in vars(cls).items() if name.startswith("test_")}
        for name, check in all_checks(cls).items():
            if claim := getattr(check, "claim", ""):
                setattr(cls, name, check if getattr(cls, claim, None) else None)  # pytest collects no None

    @property
    def who(self) -> str:
        """The target, as errors name it."""
        target = inspect.getattr_static(type(self), "target")
        return target if isinstance(target, str) else str(getattr(target, "__qualname__", target))

    def load(self) -> Any:
        """The object that `target` names; PluginError when it cannot be imported."""
        return loaded(inspect.getattr_static(type(self), "target"), self)

    def section(self, config: Any) -> Any:
        """The settings section of the first of `plugins`, or None."""
        return config.plugins.get(name_of(self.plugins[0])) if self.plugins else None

    def config(self) -> Any:
        """The `RunConfig` of `settings` and `plugins`; ConfigError naming a key that is wrong."""
        nested: dict[str, Any] = {}
        for key, value in {**SETTINGS, **self.defaults, **self.settings}.items():
            *path, last = key.split(".")
            place = nested
            for part in path:
                place = place.setdefault(part, {})
            place[last] = value
        _, config = configure([nested], [], list(self.plugins))
        return config.config

    def need(self, holds: bool, message: str) -> None:
        """Raise `Breach`, which names the target, unless it holds."""
        need(holds, f"{self.who}: {message}")


def loaded(target: Any, suite: Any = None) -> Any:
    """The object itself, or the one that its import string names."""
    if isinstance(target, property):
        target = target.fget(suite) if target.fget else ""
    if isinstance(target, staticmethod):
        target = target.__func__
    return import_target(target) if isinstance(target, str) else target


def all_checks(suite: type[Suite]) -> dict[str, Callable[..., None]]:
    """Every check of the class and its bases, including unclaimed ones."""
    found: dict[str, Any] = {}
    for base in reversed(suite.__mro__):
        found |= vars(base).get("_own_checks", {})
    return {name: check for name, check in found.items() if callable(check)}


def checks(suite: type[Suite]) -> tuple[str, ...]:
    """Names of the checks that run."""
    return tuple(name for name in all_checks(suite) if callable(getattr(suite, name)))


def failures(suite: type[Suite], only: Sequence[str] = ()) -> dict[str, str]:
    """Runs the checks in this process, without pytest, and returns the error of each failed check by name."""
    found = {}
    for name in only or checks(suite):
        try:
            with boundary(name, PluginError):
                getattr(suite(), name)()
        except RlcoreError as error:
            found[name] = str(error)
    return found


@contextmanager
def scratch() -> Iterator[Path]:
    """A temporary directory for one check."""
    with tempfile.TemporaryDirectory(prefix="rlcore-suite-") as directory:
        yield Path(directory)


def run(work: Coroutine[Any, Any, T], limit_s: float = WAIT_S) -> T:
    """The coroutine's result on a fresh loop; `Breach` if it takes too long or leaves something behind."""

    async def limited() -> T:
        try:
            async with asyncio.timeout(limit_s):
                return await work
        except TimeoutError as cause:
            raise Breach(f"took longer than {limit_s:g} s") from cause

    with leaks():
        return asyncio.run(limited())


class ContextSuite(Suite):
    """The base of suites whose objects are built from a `BuildContext`, such as components."""

    workers: Mapping[str, Any] = {}
    """Worker classes by role, for the roles that the component requests."""
    references: Mapping[str, str] = {"policy_loss": "rlcore.algo.loss:clip"}
    """Functions of the workers, by purpose."""
    specs: Mapping[str, Any] = {}
    """`WorkerRequest.spec` by role: a `RewardModel` for a reward replica."""
    host: Any = ""
    """The class of the worker that hosts these; empty: none."""
    processes: bool = False
    """True: children are real processes; False: their code runs in this process, which is faster."""

    @asynccontextmanager
    async def context(self) -> AsyncIterator[BuildContext]:
        """The context from which the component is built. Its workers and children end with the block."""
        config = self.config()
        children = ChildProcesses() if self.processes else HereChildren()
        with scratch() as run_dir:
            bench = Bench(config, run_dir, self.references, self.specs)
            section = self.section(config)
            groups = {}
            try:
                host = await bench.start(loaded(self.host), "actor", section) if self.host else None
                for role, cls in self.workers.items():
                    groups[role] = await bench.group(loaded(cls), role, section, host)

                def workers(role: Role[Any]) -> WorkerGroup[Any]:
                    need(
                        role.name in groups, f"{self.who}: asked for the workers of '{role.name}'; add it to `workers`"
                    )
                    return groups[role.name]

                context = reward_context(config.reward.functions, run_dir, children, config.reward, config, section)
                yield replace(context, workers=workers, generator=self.generator())
                left = [worker.name for worker in getattr(children, "started", ()) if worker.alive]
                need(not left, f"{self.who}: left the child '{left[0] if left else ''}' behind; needs to close it")
            finally:
                await bench.close()
                await children.close()

    def generator(self) -> Any:
        """The rollout service that the component gets; None unless the slot has one."""
        return None


class ComponentSuite(ContextSuite):
    """The base of suites of components, which tests their life cycle; `target` is the `build` of a `Component`."""

    interface: type[Any]

    @asynccontextmanager
    async def started(self) -> AsyncIterator[Any]:
        """The component, built and started; it is closed afterwards."""
        async with self.context() as context:
            component = self.load()(context)
            try:
                await component.start()
                yield component
            finally:
                await component.close()

    def use(self, work: Callable[[Any], Awaitable[T]]) -> T:
        """The result of `work` with the component, which is started before and closed afterwards."""

        async def main() -> T:
            async with self.started() as component:
                return await work(component)

        return run(main())

    def test_it_is_what_its_slot_calls_for(self) -> None:
        """It inherits from the slot's interface, and keeps kind and parameters of every method."""

        async def main() -> type:
            async with self.context() as context:
                component = self.load()(context)
                await component.close()
                return type(component)

        self.conforms(run(main()))

    def conforms(self, cls: type) -> None:
        """`Breach` unless the class conforms to the interface."""
        need_conforming(self.who, cls, self.interface)

    def test_it_closes_twice_and_without_a_start(self) -> None:
        """Nothing is left behind."""

        async def main() -> None:
            async with self.context() as context:
                unstarted = self.load()(context)
                await unstarted.close()
                component = self.load()(context)
                await component.start()
                await component.close()
                await component.close()

        run(main())

    def test_its_state_survives_json(self) -> None:
        """Another component that restores the state has the same state."""

        async def main() -> None:
            async with self.context() as context:
                one, other = self.load()(context), self.load()(context)
                await one.start()
                try:
                    await self.warm_up(one)
                    state = one.state()
                    saved = as_json(f"{self.who}: state()", state)
                    getattr(other, "restore_state", other.restore)(saved)
                    again = as_json(f"{self.who}: state()", other.state())
                    self.need(saved == again, f"state() after restore() is {again}; needs {saved}")
                finally:
                    await one.close()
                    await other.close()

        run(main())

    def test_its_metrics_are_numbers(self) -> None:
        """Metrics are a dict of str to finite float."""

        async def main(component: Any) -> None:
            await self.warm_up(component)
            need_metrics(f"{self.who}: metrics()", component.metrics())

        self.use(main)

    async def warm_up(self, component: Any) -> None:
        """Use the component once, so that it has state and metrics."""


def as_json(who: str, value: Any) -> Any:
    """The value, written and read as JSON; `Breach` if it is not JSON as checkpoints hold it: with finite numbers, and
    keys that are text."""
    try:
        refuse_odd_keys(value, "state")
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, CheckpointError) as cause:
        raise Breach(f"{who} is not JSON: {cause}") from cause


def need_metrics(who: str, metrics: Metrics) -> None:
    """`Breach` unless these are a dict of str to finite float."""
    need(isinstance(metrics, dict), f"{who} returned {type(metrics).__name__}; needs a dict of str to float")
    for name, value in metrics.items():
        good = isinstance(name, str) and isinstance(value, (int, float)) and not isinstance(value, bool)
        need(good and abs(value) < float("inf"), f"{who}: {name!r} is {value!r}; needs str to a finite float")


def need_conforming(who: str, cls: type, interface: type) -> None:
    """`Breach` naming the deviations of the class from the interface."""
    found = breaches(cls, interface)
    need(not found, f"{who}: {cls.__qualname__} as {interface.__name__}: {'; '.join(found)}")
