"""The components of the soak's run: reward model, reward function, tool and agent, each in child processes.

`soak_run.write` copies this file into the run's work directory. There, every process registers its kind in `pids/`; the
controller registers workers.
"""

import asyncio
import json
import os
import urllib.request
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcore import RawScore, RewardReplica, WorkerClass, hookimpl

RLCORE_API = "1"
PIDS = Path(__file__).parent / "pids"


def register(kind: str) -> None:
    """Register the kind of this process, for faults that need one of this kind."""
    if PIDS.is_dir():
        (PIDS / f"{kind}.{os.getpid()}").touch()


def share(text: str) -> float:
    """A number from 0 to 1 that depends only on the text."""
    return zlib.crc32(text.encode("utf-8", "surrogatepass")) / 2**32


class SoakModel(RewardReplica):
    """A reward model whose score is a function of the text."""

    def setup(self) -> None:
        """Does nothing: there are no files."""

    async def score(self, requests: Sequence[Any]) -> list[RawScore]:
        await asyncio.sleep(0.01)
        return [
            RawScore(request.id, share(json.dumps([dict(message) for message in request.messages])))
            for request in requests
        ]

    async def health(self) -> str:
        return "fine"


def low(completions: Sequence[Any], **columns: Any) -> list[float]:
    """A sync reward function: the share of each completion's bytes below 64, which the null policy can learn."""
    register("function")
    texts = [text if isinstance(text, str) else repr([dict(letter) for letter in text]) for text in completions]
    return [sum(ord(char) < 64 for char in text) / max(1, len(text)) for text in texts]


def echo(text: str) -> str:
    """A sync tool, in a child process."""
    register("tool")
    return text


def always(text: str) -> list[Any]:
    """Every turn calls the tool."""
    from rlcore_agent_loop.tools.calls import ToolCall

    return [ToolCall("echo", {"text": f"{share(text):.6f}"})]


def agent(base_url: str, api_key: str, messages: Sequence[Mapping[str, Any]], num_turns: int = 2) -> float:
    """An agent that talks to the policy over HTTP."""
    register("agent")
    conversation = [dict(message) for message in messages]
    for turn in range(num_turns):
        body = json.dumps({"model": "policy", "messages": conversation, "max_tokens": 8}).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {api_key}"}
        with urllib.request.urlopen(urllib.request.Request(f"{base_url}/chat/completions", body, headers)) as answer:
            message = json.load(answer)["choices"][0]["message"]
        conversation.append({"role": "assistant", "content": message["content"] or ""})
        conversation.append({"role": "user", "content": f"turn {turn}"})
    return 0.0


@hookimpl
def rlcore_worker_classes() -> Sequence[WorkerClass]:
    return [WorkerClass(RewardReplica, "soak_model", SoakModel)]
