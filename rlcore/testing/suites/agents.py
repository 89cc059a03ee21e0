"""The suite of agent loops, and the policy that answers them."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any
from zlib import crc32

import numpy as np

from rlcore.contracts.agents import AgentLoop, RolloutTask
from rlcore.data.tokenizer import ByteTokens
from rlcore.errors.checks.same_prompt import other_field
from rlcore.testing.rewards import make_prompt
from rlcore.testing.suites.harness import ComponentSuite, extra
from rlcore.types import (
    Completion,
    FinishReason,
    GenerateRequest,
    Lane,
    Message,
    Prompt,
    Sampling,
    Trajectory,
    TrajectoryId,
)

NUM_SAMPLES = 3
MAX_TOKENS = 400
SAMPLING = {
    Lane.TRAIN: Sampling(0.7, top_p=0.9, top_k=50, min_p=0.01, max_tokens=MAX_TOKENS, stop=("<end>",)),
    Lane.EVAL: Sampling(0.3, top_p=0.8, top_k=20, min_p=0.02, max_tokens=MAX_TOKENS, stop=("<end>",)),
}
"""Of the rollouts: no field is the default, and the lanes differ. No response has the stop string."""
VERSION = 2
"""Of the weights that sample."""


@dataclass(frozen=True)
class Drawn:
    """A completion, and the tokens after which it was sampled."""

    context: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish: FinishReason = FinishReason.STOP


class Policy:
    """A rollout service that returns one of a few texts, chosen by the seed, the sample and the tokens before."""

    def __init__(self, responses: Sequence[str]) -> None:
        self._responses = responses
        self.drawn: dict[float, Drawn] = {}
        """Every completion by the log-prob of its first token; all log-probs differ."""
        self.requested: list[tuple[GenerateRequest, Lane]] = []
        self.num_asked = 0

    async def generate(self, requests: Sequence[GenerateRequest], lane: Lane) -> AsyncIterator[Completion]:
        """See `rlcore.contracts.rollout.Generator`."""
        for request in requests:
            self.requested.append((request, lane))
            for sample in range(request.n):
                await asyncio.sleep(0)
                yield self._completion(request, sample)

    def _completion(self, request: GenerateRequest, sample: int) -> Completion:
        key = f"{request.seed} {sample} {request.token_ids}"
        text = self._responses[crc32(key.encode()) % len(self._responses)]
        ids = [*text.encode(), ByteTokens.EOS]
        kept = ids[: request.sampling.max_tokens]
        start = self.num_asked
        self.num_asked += len(kept)
        logprobs_N = (-(1.0 + np.arange(start, start + len(kept))) / 65536).astype(np.float32)
        finish = FinishReason.STOP if len(kept) == len(ids) else FinishReason.LENGTH
        text = bytes(id_ for id_ in kept if id_ != ByteTokens.EOS).decode(errors="replace")
        self.drawn[float(logprobs_N[0])] = Drawn(tuple(request.token_ids), tuple(kept), text, finish)
        return Completion(
            request_id=request.id,
            sample=sample,
            token_ids=np.array(kept, dtype=np.int32),
            logprobs=logprobs_N,
            finish=finish,
            version=VERSION,
        )


class AgentLoopSuite(ComponentSuite):
    """An agent loop; `target` is its `build`."""

    interface = AgentLoop
    responses: Sequence[str] = ("yes", "no, not at all", "the answer is 7", "seven or so")
    """The policy's responses; for an agent that uses tools, they include calls."""
    prompts: Sequence[Prompt] = ()
    """The prompts of a rollout; empty: three questions."""
    repeats: bool = True
    """Claim: the same seeds give the same tokens."""
    records_text: bool = True
    """Claim: `completion` is the sampled text. Set it to False if the agent changes the text that rewards read."""

    def generator(self) -> Policy:
        """A policy that records its samples."""
        self.policy = Policy(self.responses)
        return self.policy

    def tasks(self, seed: int = 7) -> list[RolloutTask]:
        """A group of three samples for each prompt."""
        prompts = list(self.prompts) or [make_prompt(index) for index in range(3)]
        return [RolloutTask(prompt, 0, NUM_SAMPLES, seed + index) for index, prompt in enumerate(prompts)]

    async def roll(
        self, agent: AgentLoop, tasks: Sequence[RolloutTask], lane: Lane = Lane.TRAIN, max_tokens: int = MAX_TOKENS
    ) -> list[Trajectory]:
        """Every trajectory, in order of arrival."""
        sampling = replace(SAMPLING[lane], max_tokens=max_tokens)
        async with aclosing(agent.rollout(tasks, sampling, lane)) as found:  # type: ignore[type-var]
            return [trajectory async for trajectory in found]

    async def warm_up(self, component: Any) -> None:
        """Roll out one step."""
        await component.check([task.prompt for task in self.tasks()])
        await self.roll(component, self.tasks())

    def test_every_task_gets_its_samples(self) -> None:
        """Each id comes once with its own prompt and every segment of its sample, in either lane."""

        async def main(agent: AgentLoop) -> None:
            await agent.check([task.prompt for task in self.tasks()])
            for lane in Lane:
                self._are_complete(await self.roll(agent, self.tasks(), lane))

        self.use(main)

    def _are_complete(self, found: Sequence[Trajectory]) -> None:
        for row in found:
            self.need(isinstance(row, Trajectory), f"rollout() gave {row!r:.60}; needs a Trajectory")
        ids = [trajectory.id for trajectory in found]
        self.need(len(set(ids)) == len(ids), f"rollout() gave a trajectory twice: {sorted(ids)}")
        wanted = {TrajectoryId(task.prompt.id, task.epoch, i) for task in self.tasks() for i in range(task.n)}
        units = {id_.unit() for id_ in ids}
        self.need(units == wanted, f"rollout() gave the samples {sorted(units)}; needs {sorted(wanted)}")
        prompts = {task.prompt.id: task.prompt for task in self.tasks()}
        for trajectory in found:
            other = other_field(trajectory.prompt, prompts[trajectory.id.prompt])
            self.need(not other, f"{trajectory.id}: its prompt has another `{other}`; needs the Prompt of its task")
            parts = sorted(member.id.segment for member in found if member.id.unit() == trajectory.id.unit())
            self.need(parts == list(range(len(parts))), f"{trajectory.id}: the sample has the parts {parts}")
            good = trajectory.num_segments in (0, len(parts))
            self.need(good, f"{trajectory.id}: says num_segments={trajectory.num_segments}, and {len(parts)} came")

    def test_each_prompt_has_its_schemas(self) -> None:
        """`tool_schemas` has a list for each prompt, and a chat template can show it."""

        async def main(agent: AgentLoop) -> None:
            prompts = [task.prompt for task in self.tasks()]
            schemas = await agent.tool_schemas(prompts)
            self.need(len(schemas) == len(prompts), f"tool_schemas() has {len(schemas)} of {len(prompts)} prompts")
            for prompt, tools in zip(prompts, schemas, strict=True):
                good = len(ByteTokens().encode_prompt(prompt.messages, tools)) > 0
                self.need(good, f"tool_schemas() of '{prompt.id}': the prompt has no tokens with them")

        self.use(main)

    def test_requests_have_the_settings_and_the_lane_of_their_rollout(self) -> None:
        """Only `max_tokens` may be smaller, and `stop` may have more strings."""

        async def main(agent: AgentLoop) -> None:
            for lane, sampling in SAMPLING.items():
                self.policy.requested.clear()
                await self.roll(agent, self.tasks(), lane)
                for request, used in self.policy.requested:
                    self._follows(request, used, sampling, lane)

        self.use(main)

    def _follows(self, request: GenerateRequest, used: Lane, sampling: Sampling, lane: Lane) -> None:
        who, found = f"request '{request.id}' of a rollout in the lane '{lane}'", request.sampling
        self.need(used == lane, f"{who}: it is in the lane '{used}'")
        same = replace(found, max_tokens=sampling.max_tokens, stop=sampling.stop) == sampling
        self.need(same, f"{who}: has {found}; needs the temperature, top_p, top_k and min_p of {sampling}")
        less = found.max_tokens <= sampling.max_tokens
        self.need(less, f"{who}: has max_tokens={found.max_tokens}; needs at most {sampling.max_tokens}")
        more = set(sampling.stop) <= set(found.stop)
        self.need(more, f"{who}: has stop={found.stop}; needs {sampling.stop} among them")

    def test_arrays_speak_of_the_same_tokens(self) -> None:
        """Arrays have the right dtypes and equal lengths. Log-probs are 0 outside the mask; versions are in order."""

        async def main(agent: AgentLoop) -> None:
            for trajectory in await self.roll(agent, self.tasks()):
                self._is_whole(trajectory)

        self.use(main)

    def _is_whole(self, trajectory: Trajectory) -> None:
        who, arrays = f"{trajectory.id}", (trajectory.token_ids, trajectory.loss_mask, trajectory.logprobs)
        kinds = tuple(str(array.dtype) for array in arrays)
        self.need(kinds == ("int32", "bool", "float32"), f"{who}: dtypes {kinds}; needs int32, bool, float32")
        shapes = {array.shape for array in arrays}
        self.need(
            len(shapes) == 1 and trajectory.token_ids.ndim == 1, f"{who}: shapes {sorted(shapes)}; needs one (T,)"
        )
        mask_T, logprobs_T = trajectory.loss_mask, trajectory.logprobs
        self.need(bool(mask_T.any()) and not mask_T[0], f"{who}: needs a sampled token, and none at position 0")
        self.need(not logprobs_T[~mask_T].any(), f"{who}: a log-prob stands where nothing was sampled; needs 0")
        good = np.isfinite(logprobs_T).all() and float(logprobs_T.max()) <= 0
        self.need(bool(good), f"{who}: log-probs need to be finite and at most 0")
        budget = trajectory.num_sampled <= MAX_TOKENS
        self.need(budget, f"{who}: {trajectory.num_sampled} sampled tokens; needs at most max_tokens={MAX_TOKENS}")
        self.need(
            isinstance(trajectory.finish, FinishReason), f"{who}: finish is {trajectory.finish!r}; needs a FinishReason"
        )
        starts = [start for start, _ in trajectory.versions]
        ordered = starts == sorted(set(starts)) and all(0 <= start < len(mask_T) for start in starts)
        self.need(bool(starts) and ordered, f"{who}: versions {trajectory.versions}; needs starts in order")
        others = {version for _, version in trajectory.versions} - {VERSION}
        self.need(not others, f"{who}: versions {trajectory.versions}; its completions have version {VERSION}")

    def test_tokens_are_trained_as_they_were_sampled(self) -> None:
        """Ids and log-probs are those of the completions: none were tokenised again or paired with those of others.
        Each follows the tokens that it was sampled after.

        A completion may lack its end only in a trajectory that says that it was cut off.
        """

        async def main(agent: AgentLoop) -> None:
            for trajectory in await self.roll(agent, self.tasks()):
                self._sampled(trajectory)

        self.use(main)

    def _sampled(self, trajectory: Trajectory) -> list[Drawn]:
        """The completions of a trajectory; `Breach` where it has other tokens."""
        places, at, completions = np.flatnonzero(trajectory.loss_mask), 0, []
        while at < len(places):
            drawn = self.policy.drawn.get(float(trajectory.logprobs[places[at]]), Drawn())
            num, start = len(drawn.token_ids), int(places[at])
            here = places[at : at + max(1, num)]
            found = tuple(trajectory.token_ids[here].tolist())
            same = num > 0 and found == drawn.token_ids[: len(found)] and int(here[-1]) - start == len(here) - 1
            self.need(same, f"{trajectory.id}: the ids {found[:12]} at {start} were not sampled so")
            whole = len(found) == num or trajectory.finish is FinishReason.LENGTH
            self.need(whole, f"{trajectory.id}: lacks {num - len(found)} sampled tokens of {num}")
            before = tuple(trajectory.token_ids[:start].tolist()) == drawn.context
            self.need(before, f"{trajectory.id}: the ids before {start} are not those of the request that was sampled")
            at += len(here)
            completions.append(drawn)
        return completions

    def test_a_response_that_the_budget_cuts_says_so(self) -> None:
        """With `max_tokens=1` a sample whose last completion is cut has `FinishReason.LENGTH`."""

        async def main(agent: AgentLoop) -> None:
            found = await self.roll(agent, self.tasks(), max_tokens=1)
            last = {row.id.unit(): row for row in sorted(found, key=lambda row: row.id)}
            for trajectory in last.values():
                completions = self._sampled(trajectory)
                cut = bool(completions) and completions[-1].finish is FinishReason.LENGTH
                good = not cut or trajectory.finish is FinishReason.LENGTH
                self.need(
                    good, f"{trajectory.id}: max_tokens cut it, and finish is {trajectory.finish!r}; needs LENGTH"
                )

        self.use(main)

    @extra("records_text")
    def test_the_text_is_what_was_sampled(self) -> None:
        """A string contains the text of each completion, and messages of the assistant are parts of them."""

        async def main(agent: AgentLoop) -> None:
            found = await self.roll(agent, self.tasks())
            drawn = {row.id: [completion.text for completion in self._sampled(row)] for row in found}
            for row in found:
                if isinstance(row.completion, str):
                    bad = [text for text in drawn[row.id] if text.strip() not in row.completion]
                    self.need(not bad, f"{row.id}: completion {row.completion[:60]!r} lacks the sampled {bad[:1]}")
                    continue
                sampled = "".join(text for id_ in sorted(drawn) if id_.unit() == row.id.unit() for text in drawn[id_])
                spoken = [str(message.get("content") or "") for message in row.completion if _is_assistant(message)]
                bad = [text for text in spoken if text.strip() not in sampled]
                self.need(not bad, f"{row.id}: a message of the assistant, {bad[:1]}, was not sampled")

        self.use(main)

    @extra("repeats")
    def test_seeds_decide_what_is_sampled(self) -> None:
        """The same seeds repeat in any order of tasks; other seeds differ."""

        async def main(agent: AgentLoop) -> None:
            one, other = [_ids(await self.roll(agent, order)) for order in (self.tasks(), self.tasks()[::-1])]
            self.need(one == other, "the same seeds give other tokens where tasks come in another order")
            self.need(one != _ids(await self.roll(agent, self.tasks(seed=700))), "other seeds give the same tokens")
            samples = {ids for name, ids in one.items() if name.prompt == self.tasks()[0].prompt.id}
            every = set(one.values())
            self.need(len(samples) > 1 or len(every) > 1, "all samples are the same; each needs a separate seed")

        self.use(main)

    def test_rollouts_side_by_side_do_not_mix(self) -> None:
        """A step and an evaluation run at the same time."""

        async def main(agent: AgentLoop) -> None:
            await agent.check([task.prompt for task in self.tasks()])
            for found in await asyncio.gather(*(self.roll(agent, self.tasks(), lane) for lane in Lane)):
                self._are_complete(found)

        self.use(main)

    def test_a_rollout_that_is_closed_early_disturbs_no_other(self) -> None:
        """The next rollout is complete."""

        async def main(agent: AgentLoop) -> None:
            stream = agent.rollout(self.tasks(), SAMPLING[Lane.TRAIN], Lane.TRAIN)
            async with aclosing(stream) as found:  # type: ignore[type-var]
                async for _ in found:
                    break
            self._are_complete(await self.roll(agent, self.tasks()))

        self.use(main)


def _is_assistant(message: Message) -> bool:
    return message.get("role") == "assistant"


def _ids(found: Sequence[Trajectory]) -> dict[TrajectoryId, tuple[int, ...]]:
    return {completion.id: tuple(completion.token_ids.tolist()) for completion in found}
