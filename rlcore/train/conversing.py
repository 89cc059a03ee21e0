"""A conversation with the weights of a checkpoint, on the engine that sampled in training."""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

from rlcore.aio import in_daemon_thread
from rlcore.contracts.rollout import Generator
from rlcore.contracts.tokens import Tokens
from rlcore.errors import WorkerError
from rlcore.plan import RunPlan
from rlcore.train.loaded_run import loaded_sampler
from rlcore.types import FrozenDict, GenerateRequest, Lane, Message, Sampling

RESET, EXIT = "/reset", "/exit"


@dataclass
class Chat:
    """The messages so far, and the sampler that answers them."""

    generator: Generator
    tokens: Tokens
    sampling: Sampling
    seed: int
    context_length: int | None
    system: str = ""
    """The system message; empty: that of the run, if it has one."""

    def __post_init__(self) -> None:
        self._turn = 0
        self.reset()

    def reset(self) -> None:
        """Start over with an empty conversation."""
        first = FrozenDict({"role": "system", "content": self.system})
        self._messages: list[Message] = [first] if self.system else []

    async def answer(self, text: str) -> str:
        """The policy's answer to the user's next message. WorkerError when the conversation exceeds the window."""
        messages = [*self._messages, FrozenDict({"role": "user", "content": text})]
        ids = self.tokens.encode_prompt(messages)
        room = self.context_length
        if room is not None and len(ids) + self.sampling.max_tokens > room:
            raise WorkerError(
                f"chat: {len(ids)} tokens and an answer of {self.sampling.max_tokens} exceed the window of {room}; "
                f"begin again with {RESET}, or lower --max-tokens"
            )
        request = GenerateRequest(f"chat/{self._turn}", ids, self.sampling, 1, self.seed + self._turn, "chat")
        self._turn += 1
        answers = [completion async for completion in self.generator.generate([request], Lane.EVAL)]
        if answers[0].error:
            raise WorkerError(f"chat: {answers[0].error}; begin again with {RESET}")
        answer = self.tokens.decode(answers[0].token_ids.tolist())
        self._messages = [*messages, FrozenDict({"role": "assistant", "content": answer})]
        return answer


async def converse(
    plan: RunPlan, weights: Path, sampling: Sampling, system: str, read: Callable[[], str], say: Callable[[str], None]
) -> None:
    """Answer each line that `read` returns, until it is empty (without its line break: a blank line) or EXIT.

    `say` gets the answers, or a one-line error.
    """
    async with loaded_sampler(plan, weights) as sampler:
        talk = Chat(sampler.generator, sampler.tokens, sampling, plan.config.train.seed, sampler.context_length, system)
        async for line in _lines(read):
            if line == RESET:
                talk.reset()
                say("(the conversation begins again)")
                continue
            try:
                say(await talk.answer(line))
            except WorkerError as error:
                say(f"({error})")


async def _lines(read: Callable[[], str]) -> AsyncIterator[str]:
    """Lines that say something, without the spaces around them, up to the end of the input."""
    while line := await in_daemon_thread("chat: reading", read):
        text = line.strip()
        if text == EXIT:
            return
        if text:
            yield text
