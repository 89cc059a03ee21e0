"""Conformance suites of tools and environments; those of other offers are in `rlcore.testing.suites`."""

import inspect
import json
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

from rlcore.errors import ChildError
from rlcore.testing import open_children
from rlcore.testing.rewards import make_prompt
from rlcore.testing.suites.harness import Suite, extra, run
from rlcore.testing.suites.reward_function import ODD
from rlcore.types import Message, Prompt
from rlcore_agent_loop.conversation.environments import Environments, SampleEnvironment, Step
from rlcore_agent_loop.settings import AgentLoopSettings, EnvironmentSettings, ToolSettings
from rlcore_agent_loop.tools.calls import ToolCall
from rlcore_agent_loop.tools.tools import SampleTools, Tools

T = TypeVar("T")
NAME = "tested"
ERROR = "error: "


class ReferenceSuite(Suite):
    """The suite for offers by reference, which run in child processes unless they are async."""

    def reference(self) -> str:
        """'module:name' or '/file.py:name'."""
        reference = inspect.getattr_static(type(self), "target")
        self.need(isinstance(reference, str), "needs 'module:name' or '/file.py:name': children load it by reference")
        return str(reference)

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Raise `Breach` if the plugin logs a warning inside: errors at the end of a sample are logged."""
        log_lines: list[str] = []

        class Listener(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                log_lines.append(record.getMessage())

        listener, logger = Listener(logging.WARNING), logging.getLogger("rlcore_agent_loop")
        logger.addHandler(listener)
        try:
            yield
        finally:
            logger.removeHandler(listener)
        self.need(not log_lines, f"the end of a sample fails: {log_lines[0] if log_lines else ''}")


@asynccontextmanager
async def _tools(settings: AgentLoopSettings, describe: bool, processes: bool) -> AsyncIterator[Tools]:
    async with open_children(processes) as children:
        tools = Tools(children, settings)
        try:
            await tools.start(describe)
            yield tools
        finally:
            await tools.close()


class ToolSuite(ReferenceSuite):
    """A tool; `target` is the reference of its function or class."""

    calls: Sequence[tuple[Mapping[str, Any], str | None]] = ()
    """Arguments, and the result as text; None: any result that is not an error. At least one."""
    columns: Mapping[str, Any] = {}
    """Columns of the prompt's row."""
    described: bool = True
    """Claim: it has the type hints and docstring that its schema is made from."""
    deterministic: bool = True
    """Claim: the same calls have the same results in every sample."""

    def use(self, work: Callable[[Tools], Awaitable[T]], describe: bool = False, processes: bool = False) -> T:
        """The result of `work` with the tool."""
        settings = AgentLoopSettings(tools={NAME: ToolSettings(fn=self.reference())}, children=1)

        async def main() -> T:
            async with _tools(settings, describe, processes) as tools:
                return await work(tools)

        return run(main())

    def sample(self, tools: Tools, index: int) -> SampleTools:
        """The tools that one sample may call."""
        return tools.open(f"sample {index}", make_prompt(index, **self.columns))

    async def ask(self, sample: SampleTools, arguments: Mapping[str, Any]) -> str:
        """The result of a call, as the policy sees it."""
        [text] = await sample.results([ToolCall(NAME, dict(arguments))], 8, 2000)
        return text

    @extra("described")
    def test_the_policy_can_be_shown_it(self) -> None:
        """Its schema is JSON, and describes every argument of `calls`."""

        async def main(tools: Tools) -> None:
            [schema] = tools.schemas()
            json.dumps(schema)
            known = schema["function"]["parameters"].get("properties", {})
            for arguments, _ in self.calls:
                unknown = sorted(set(arguments) - set(known))
                self.need(not unknown, f"its schema has no argument {', '.join(unknown)}; it has {', '.join(known)}")
            bare = sorted(name for name, argument in known.items() if not argument.get("description"))
            self.need(not bare, f"its arguments {', '.join(bare)} have no description; add them to Args:")

        self.use(main, describe=True)

    def test_calls_have_their_results(self) -> None:
        """In one sample, one after another."""
        self._have_results(processes=False)

    def test_it_runs_in_a_separate_process(self) -> None:
        """Loaded there by its target."""
        self._have_results(processes=True)

    def _calls(self) -> Sequence[tuple[Mapping[str, Any], str | None]]:
        self.need(bool(self.calls), "needs `calls`, at least one")
        return self.calls

    def _have_results(self, processes: bool) -> None:
        calls = self._calls()

        async def main(tools: Tools) -> None:
            sample = self.sample(tools, 0)
            for arguments, wanted in calls:
                found = await self.ask(sample, arguments)
                self.need(not found.startswith(ERROR), f"the call {dict(arguments)} fails: {found}")
                self.need(wanted in (None, found), f"the call {dict(arguments)} gives {found!r}; needs {wanted!r}")
            await sample.close()

        with self.quiet():
            self.use(main, processes=processes)

    def test_a_wrong_call_is_a_text_and_disturbs_no_other(self) -> None:
        """Unknown arguments, and none: errors, after which the right call works."""
        arguments, _ = self._calls()[0]

        async def main(tools: Tools) -> None:
            sample = self.sample(tools, 0)
            found = await self.ask(sample, {"no_such_argument_": 1})
            self.need(found.startswith(ERROR), f"a call with an unknown argument gives {found!r}; needs an error")
            found = await self.ask(sample, arguments)
            self.need(not found.startswith(ERROR), f"after a wrong call the right one fails: {found}")
            await sample.close()

        self.use(main)

    @extra("deterministic")
    def test_samples_do_not_share_state(self) -> None:
        """Two samples that call in turn get the same as one alone."""
        calls = self._calls()

        async def main(tools: Tools) -> None:
            alone = self.sample(tools, 0)
            wanted = [await self.ask(alone, arguments) for arguments, _ in calls]
            await alone.close()
            two = [self.sample(tools, index) for index in (1, 2)]
            for (arguments, _), text in zip(calls, wanted, strict=True):
                for sample in two:
                    found = await self.ask(sample, arguments)
                    self.need(found == text, f"{dict(arguments)} gives {found!r} next to another, {text!r} alone")
            for sample in two:
                await sample.close()

        self.use(main)


class EnvironmentSuite(ReferenceSuite):
    """An environment; `target` is the reference of its class."""

    kwargs: Mapping[str, Any] = {}
    """The settings of `plugins.agent_loop.environment.kwargs`."""
    prompt: Prompt | None = None
    """First messages of a sample; None: a question."""
    turns: Sequence[str] = ("yes", "7", "no, not at all")
    """Turns of the policy, until the environment ends the sample."""
    known_good: Sequence[str] = ()
    known_bad: Sequence[str] = ()
    """Claim: turns that earn less than those of `known_good`."""
    ends_within: int = 0
    """Claim: the number of turns after which it has ended, whatever the policy does; 0: `max_turns`."""
    deterministic: bool = True
    """Claim: the same seed and turns give the same answers."""

    def use(self, work: Callable[[Environments], Awaitable[T]], processes: bool = False) -> T:
        """The result of `work` with the environments of a run."""
        environment = EnvironmentSettings(fn=self.reference(), kwargs=dict(self.kwargs))
        settings = AgentLoopSettings(environment=environment, children=1)

        async def main() -> T:
            async with _tools(settings, False, processes) as tools:
                environments = Environments(environment, tools.stateful)
                await environments.start()
                return await work(environments)

        return run(main())

    async def begin(self, environment: SampleEnvironment, seed: int = 5) -> list[Message]:
        """The opening messages."""
        return list(await environment.reset(self.prompt or make_prompt(0), seed))

    async def say(self, environment: SampleEnvironment, messages: list[Message], turn: str) -> Step:
        """Append a turn and its answer; `Breach` when its reward is not a finite number."""
        messages.append({"role": "assistant", "content": turn})
        step = await environment.step(messages)
        self.need(math.isfinite(step.reward), f"step() gave the reward {step.reward}; needs a finite number")
        messages += [] if step.restart else step.messages
        return step

    async def play(self, environments: Environments, sample: str, turns: Sequence[str]) -> tuple[list[Step], float]:
        """The steps of a whole sample, and its reward."""
        environment, steps = environments.open(sample), []
        messages = await self.begin(environment)
        for turn in turns:
            steps.append(await self.say(environment, messages, turn))
            if steps[-1].done:
                break
        await environment.close()
        return steps, sum(step.reward for step in steps)

    def test_it_opens_answers_and_closes(self) -> None:
        """Messages, steps, finite rewards; nothing fails at the end."""
        self._plays(processes=False)

    def test_it_runs_in_a_separate_process(self) -> None:
        """Loaded there by its target; its answers pickle."""
        self._plays(processes=True)

    def _plays(self, processes: bool) -> None:
        async def main(environments: Environments) -> None:
            await self.play(environments, "one", self.turns)

        with self.quiet():
            self.use(main, processes)

    def test_it_closes_without_a_step(self) -> None:
        """The end of a sample whose first turn was cut off."""

        async def main(environments: Environments) -> None:
            environment = environments.open("one")
            await self.begin(environment)
            await environment.close()

        with self.quiet():
            self.use(main)

    def test_odd_turns_are_answered(self) -> None:
        """Empty, huge, unicode, templates."""

        async def main(environments: Environments) -> None:
            for name, turn in ODD.items():
                try:
                    await self.play(environments, name, [turn])
                except ChildError as error:
                    self.need(False, f"the turn '{name}' fails: {error}; needs a Step, as for any wrong answer")

        self.use(main)

    @extra("deterministic")
    def test_samples_do_not_share_state(self) -> None:
        """Two samples that take turns get the same as one alone, and the same seed repeats."""

        async def main(environments: Environments) -> None:
            wanted, _ = await self.play(environments, "alone", self.turns)
            two = [environments.open(name) for name in ("left", "right")]
            talks = [await self.begin(environment) for environment in two]
            for turn, step in zip(self.turns, wanted, strict=False):
                for environment, messages in zip(two, talks, strict=True):
                    found = await self.say(environment, messages, turn)
                    self.need(found == step, f"answers {turn!r:.40} with {found} next to another sample, {step} alone")
            for environment in two:
                await environment.close()

        self.use(main)

    @extra("ends_within")
    def test_it_ends(self) -> None:
        """After `ends_within` turns at most."""

        async def main(environments: Environments) -> None:
            turns = [self.turns[index % len(self.turns)] for index in range(self.ends_within)]
            steps, _ = await self.play(environments, "one", turns)
            self.need(steps[-1].done, f"has not ended after {self.ends_within} turns")

        self.use(main)

    @extra("known_bad")
    def test_wrong_turns_earn_less_than_right_ones(self) -> None:
        """The sum of a sample's rewards."""

        async def main(environments: Environments) -> None:
            _, right = await self.play(environments, "right", self.known_good)
            _, wrong = await self.play(environments, "wrong", self.known_bad)
            self.need(wrong < right, f"wrong turns earn {wrong:g}, right ones {right:g}; needs less")

        self.use(main)
