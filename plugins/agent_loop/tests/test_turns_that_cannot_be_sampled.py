"""A turn of which rollout replicas die ends its sample as failed, with every agent."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rlcore_agent_loop import Environment, Step
from rlcore_agent_loop.rewards import environment
from rlcore_agent_loop.settings import AgentLoopSettings, EnvironmentSettings
from rlcore_agent_loop.testing import END, HELLO, Ask, ScriptedPolicy, call, served, talk

from rlcore.contracts.templates import TemplateRefused
from rlcore.data.tokenizer import ByteTokens
from rlcore.errors import RewardError
from rlcore.types import ROLLOUT_ERROR, Completion, GenerateRequest, Lane, Message

WHY = "rollout: request 'p/0/0': replicas died 4 times while it was served: killed"


class Poisoned(ScriptedPolicy):
    """Cannot sample the turn of that number of sample 0."""

    def __init__(self, turn: int, says: str = call("add", a=1, b=2)) -> None:
        super().__init__(lambda sample, turn, ids: [*says.encode(), END])
        self.turn = turn

    async def generate(self, requests: Sequence[GenerateRequest], lane: Lane) -> AsyncIterator[Completion]:
        async for completion in super().generate(requests, lane):
            fields = completion.request_id.split("/")
            sample, turn = (int(fields[-2]), int(fields[-1]) + 1) if len(fields) > 3 else (completion.sample, 1)
            if (sample, turn) != (0, self.turn):
                yield completion
                continue
            nothing = np.zeros(0, np.int32)
            yield replace(completion, token_ids=nothing, logprobs=nothing.astype(np.float32), error=WHY)


def test_the_sample_ends_with_the_turns_that_it_had_and_the_others_continue() -> None:
    for turn in (1, 2):
        settings = AgentLoopSettings(describe_tools="never", max_turns=3)
        talked = talk(Poisoned(turn), settings, num_samples=3)
        first, *others = sorted(talked.trajectories, key=lambda trajectory: trajectory.id.sample)
        assert first.info["ended_by"] == "rollout_failed"
        assert first.info[ROLLOUT_ERROR] == first.info["error"] == WHY
        assert (first.turns, first.num_sampled > 0) == (turn - 1, turn > 1)
        assert [(other.turns, ROLLOUT_ERROR in other.info) for other in others] == [(3, False)] * 2
        assert talked.metrics["agent/ended/rollout_failed_frac"] > 0


class Going(Environment):
    """Gives half a point for each turn, and never ends."""

    async def step(self, messages: Sequence[Message]) -> Step:
        return Step([{"role": "user", "content": "go on"}], reward=0.5)


def test_the_sum_of_an_environments_rewards_is_unknown_when_a_later_turn_cannot_be_sampled() -> None:
    settings = AgentLoopSettings(environment=EnvironmentSettings(f"{__file__}:Going"), children=1, max_turns=3)
    found = talk(Poisoned(2, says="yes"), settings, num_samples=2).trajectories
    first, other = sorted(found, key=lambda trajectory: trajectory.id.sample)
    assert (first.info["ended_by"], environment(other)) == ("rollout_failed", 1.5)
    with pytest.raises(RewardError, match=r"gave 0\.5 and then failed: rollout: request"):
        environment(first)


class Refuses(ByteTokens):
    """A template that refuses a result with a certain text."""

    def _render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, opening: bool
    ) -> str:
        if any("no tool 'sub'" in str(message.get("content")) for message in messages):
            raise TemplateRefused("the chat template of 'm': TemplateError: not that")
        return super()._render(messages, tools, opening=opening)


def test_a_result_that_the_chat_template_refuses_ends_its_sample_and_no_other() -> None:
    def script(sample: int, turn: int, ids: tuple[int, ...]) -> list[int]:
        return [*call("sub" if sample == 0 else "add").encode(), END] if turn == 1 else [*b"Done.", END]

    settings = AgentLoopSettings(describe_tools="never")
    found = talk(ScriptedPolicy(script), settings, num_samples=3, tokens=Refuses()).trajectories
    first, *others = sorted(found, key=lambda trajectory: trajectory.id.sample)
    assert first.info["ended_by"] == "rollout_failed"
    assert first.info[ROLLOUT_ERROR] == "the chat template of 'm': TemplateError: not that"
    assert [(other.info["ended_by"], other.turns) for other in others] == [("stop", 2)] * 2


def test_an_agent_gets_the_error_and_may_not_ask_again() -> None:
    async def work(ask: Ask) -> None:
        for _ in range(2):
            status, found = await ask(HELLO)
            assert (status, found["error"]["code"]) == (400, "rollout_failed")

    policy = Poisoned(2)  # an agent's turns are counted from 1
    recording = served(policy, work)
    assert recording.episode.info[ROLLOUT_ERROR] == WHY
    assert recording.episode.ended_by == "rollout_failed"
    assert len(policy.requests) == 1
    assert recording.failure is None
