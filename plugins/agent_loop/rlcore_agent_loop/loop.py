"""The agent loop: every sample is a conversation, and every conversation is one coroutine."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from rlcore.contracts.agents import AgentLoop, RolloutTask
from rlcore.errors import ConfigError, boundary
from rlcore.imports import import_target
from rlcore.types import Lane, Metrics, Prompt, Sampling, Trajectory
from rlcore_agent_loop.agents.agent import Agents
from rlcore_agent_loop.conversation.conversation import Conversation, ConversationContext
from rlcore_agent_loop.conversation.environments import Environments
from rlcore_agent_loop.conversation.first_turns import FirstTurns
from rlcore_agent_loop.conversation.prompt_checks import PromptBudget, check_column
from rlcore_agent_loop.conversation.turn_sampler import TurnSampler, group_name
from rlcore_agent_loop.settings import AgentLoopSettings
from rlcore_agent_loop.tools.parsers import PARSERS, Parser
from rlcore_agent_loop.tools.tools import Tools
from rlcore_agent_loop.workers.admission import SampleLimit
from rlcore_agent_loop.workers.open_conversations import Counts, OpenConversations, Sample

if TYPE_CHECKING:
    from rlcore.contracts.children import Children
    from rlcore.contracts.rollout import Generator
    from rlcore.contracts.tokens import Tokens

logger = logging.getLogger(__name__)


def parser_of(name: str) -> Parser:
    """The parser of `plugins.agent_loop.parser`; ConfigError when it is not a function."""
    if name in PARSERS:
        return PARSERS[name]
    with boundary(f"plugins.agent_loop.parser: {name}", ConfigError):
        found = import_target(name)
    if not callable(found):
        raise ConfigError(
            f"plugins.agent_loop.parser: {name} is {type(found).__name__}; needs a function of a turn's text"
        )
    return cast(Parser, found)


class ToolLoop(AgentLoop):
    """Alternates turns of the policy with answers of its tools and environment until something ends the sample.

    The first turns of a step's groups are requested together, so that each prompt is computed once. From then on every
    conversation proceeds independently and is delivered as soon as it ends.
    """

    def __init__(
        self,
        generator: "Generator",
        tokens: "Tokens",
        children: "Children",
        settings: AgentLoopSettings,
        window: int | None = None,
    ) -> None:
        """`window`: the engine's longest context."""
        self._generator, self._tokens, self._settings = generator, tokens, settings
        self._tools = Tools(children, settings)
        self._agents = Agents(children, settings.agent, settings.env) if settings.agent.fn else None
        self._admission = SampleLimit(settings.max_conversations)
        self._environments = (
            Environments(settings.environment, self._tools.stateful) if settings.environment.fn else None
        )
        self._kit = ConversationContext(
            tokens, self._tools, self._environments, parser_of(settings.parser), settings, window=window
        )
        self._prompt_budget = PromptBudget(self._kit)
        self._counts = Counts()

    async def start(self) -> None:
        """Start tools and environment. ConfigError when the chat template cannot serve their messages."""
        if self._agents is not None:
            self._check_roles_of_agents()
            await self._agents.start()
            return
        settings = self._settings
        with_tools = bool(settings.tools or settings.mcp)
        self._check_roles(())
        describe = with_tools and settings.describe_tools == "template"
        if describe and not self._tokens.tells_tools():
            raise ConfigError(
                "plugins.agent_loop.describe_tools=template: the chat template does not describe tools to the policy; "
                "choose never and describe them in data.system_prompt, or name another template in model.chat_template"
            )
        await self._tools.start(describe)
        if describe:
            self._check_roles(self._tools.schemas())
        if self._environments is not None:
            await self._environments.start()

    def _check_roles(self, schemas: Sequence[Mapping[str, Any]]) -> None:
        role, with_tools = self._settings.result_role, bool(self._settings.tools or self._settings.mcp)
        roles = [*([role] if with_tools else []), *(["user"] if self._environments else [])]
        try:
            self._tokens.check_continuation(roles, schemas)
        except ConfigError as error:
            raise ConfigError(f"{error}; or another plugins.agent_loop.result_role") from error

    def _check_roles_of_agents(self) -> None:
        """Agents may not use tools, so a template that cannot continue with tool results is only a warning."""
        self._tokens.check_continuation(["user"])
        try:
            self._tokens.check_continuation(["tool"])
        except ConfigError as error:
            logger.warning("%s; until then each request with a result of a tool begins another part", error)

    async def close(self) -> None:
        await self._tools.close()
        if self._agents is not None:
            await self._agents.close()

    async def tool_schemas(self, prompts: Sequence[Prompt]) -> Sequence[Sequence[Mapping[str, Any]]]:
        """Empty for agents, whose requests say which tools they have."""
        check_column(self._settings, prompts)
        return self.schemas_of(prompts)

    def schemas_of(self, prompts: Sequence[Prompt]) -> Sequence[Sequence[Mapping[str, Any]]]:
        """`tool_schemas` of some of the prompts."""
        if self._agents is not None:
            return [()] * len(prompts)
        return [self._tools.open("", prompt).schemas for prompt in prompts]

    async def check(self, prompts: Sequence[Prompt]) -> None:
        """ConfigError naming a prompt whose tools do not exist, or that leaves no context for a turn."""
        check_column(self._settings, prompts)
        self.check_prompts(prompts)

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """`check` for some of the prompts."""
        if self._agents is not None:
            return
        for prompt in prompts:
            tools = self._tools.open("", prompt)
            if self._environments is None:  # an environment opens conversations itself
                self._prompt_budget.check(prompt, tools.schemas)

    async def rollout(self, tasks: Sequence[RolloutTask], sampling: Sampling, lane: Lane) -> AsyncIterator[Trajectory]:
        """Every trajectory of every task, as soon as its sample ends.

        `sampling.max_tokens` bounds what follows the prompt of each part, results included.
        """
        async with aclosing(self.samples(self._generator, tasks, sampling, lane)) as samples:
            async for parts in samples:
                if lane is Lane.TRAIN:
                    self._counts.add(parts)
                for trajectory in parts:
                    yield trajectory

    def samples(
        self,
        generator: "Generator",
        tasks: Sequence[RolloutTask],
        sampling: Sampling,
        lane: Lane,
        done: Collection[Sample] = (),
    ) -> AsyncGenerator[Sequence[Trajectory], None]:
        """The parts of each sample as soon as it ends, except for `done` ones, with turns from `generator`."""
        conversations, turns = OpenConversations(self._admission), TurnSampler(generator, sampling, lane)
        return conversations.samples(
            tasks, lambda group: self._begin(conversations, turns, group, sampling, done), done
        )

    def _begin(
        self,
        conversations: OpenConversations,
        turns: TurnSampler,
        tasks: Sequence[RolloutTask],
        sampling: Sampling,
        done: Collection[Sample],
    ) -> None:
        requests, opening = [], FirstTurns(conversations, self._kit.timers)
        due = asyncio.get_running_loop().time() + self._settings.time_s
        for task in tasks:
            ids: Sequence[int] = ()
            name = group_name(task)
            samples = [sample for sample in range(task.n) if (name, sample) not in done]
            if self._agents is not None:
                for sample in samples:
                    conversations.begin(partial(self._agents.run, self._kit, turns, task, sample, sampling))
                continue
            if self._environments is None:
                ids = self._first_ids(task)
                budget = self._kit.budget(len(ids), sampling.max_tokens, task.prompt.id)
                requests.append(turns.first(task, ids, self._kit.turn_budget(budget)))
            for sample in samples:
                conversation = Conversation(self._kit, turns, task, sample, sampling, due, ids)
                if self._environments is None:
                    opening.waiting[name, sample] = conversation
                else:
                    conversations.begin(conversation.run)
        if requests:
            conversations.spawn(opening.sample(turns, requests, due))

    def _first_ids(self, task: RolloutTask) -> Sequence[int]:
        return self._tokens.encode_prompt(task.prompt.messages, self._tools.open("", task.prompt).schemas)

    def metrics(self) -> Metrics:
        """See `Counts.metrics`; of the training samples that ended since the last time."""
        counts, self._counts = self._counts, Counts()
        return counts.metrics()
