"""Mistakes of a first day that only a run finds: `benchmarks/first_contact.py` makes them after the others."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from rlcore.testing.service import ServiceAnswer, serving

REWARDS = """import math, time
from pathlib import Path
def strings(completions, **kwargs):
    return ["1.0" for _ in completions]
def nan(completions, **kwargs):
    return [math.nan for _ in completions]
def raises(completions, **kwargs):
    return [kwargs["answr"] for _ in completions]
def strips(completions, **kwargs):
    return [float(len(completion.strip())) for completion in completions]
def length(completions, **kwargs):
    return [float(len(completion)) for completion in completions]
def sleeps(completions, **kwargs):
    Path("asked").touch()
    time.sleep(60)
"""
CHAT = '{"messages": [{"role": "user", "content": "a"}], "answer": "b"}\n'


@dataclass(frozen=True)
class RunMistake:
    """A mistake in a run, and words that the answer must have."""

    name: str
    words: str
    settings: tuple[str, ...]
    code: int = 2
    files: Mapping[str, str] = field(default_factory=dict)
    command: str = "train"
    service: ServiceAnswer | None = None
    """Answers the scorer's requests; its address replaces URL in the settings."""
    interrupt_at: str = ""
    """The run gets Ctrl-C when this file exists."""


def reward(name: str) -> str:
    """The setting that names a function of REWARDS."""
    return f"reward.functions.ok.fn=rewards.py:{name}"


def scored(name: str, words: str, answer: ServiceAnswer | None, *settings: str, urls: str = "[URL]") -> RunMistake:
    """A mistake of a scoring service."""
    served_by = "plugins.reward_loop.rewards.right.served_by=scorer"
    service = f"plugins.reward_loop.services.scorer.urls={urls}"
    return RunMistake(name, words, ("--plugin", "reward_loop", served_by, service, *settings), service=answer)


DEADLINE = "plugins.reward_loop.services.scorer.deadline_s=1"
RUN_MISTAKES = (
    RunMistake("reward returns strings", "ok: returned str '1.0'; needs a number", (reward("strings"),)),
    RunMistake("reward returns NaN", "ok: returned nan; needs a finite number", (reward("nan"),)),
    RunMistake("reward raises", "ok: rewards.py:8: KeyError: 'answr' (the row has answer)", (reward("raises"),)),
    RunMistake(
        "TRL's reward on chat prompts",
        "the text is completion[-1]['content']",
        (reward("strips"), "data.sources.train.path=chat.jsonl"),
        files={"chat.jsonl": CHAT + CHAT.replace('"a"', '"c"')},
    ),
    RunMistake(
        "max_tokens too small", "raise rollout.max_tokens=1", (reward("length"), "rollout.max_tokens=1"), code=0
    ),
    RunMistake("a tracker whose library is missing", "pip install wandb", ("track.to=wandb",)),
    RunMistake("a tracker that is not in a list", "trained 2 steps", ("track.to=tensorboard",), code=0),
    RunMistake(
        "name taken", "exists; choose another name", ("train.name=taken",), files={"runs/taken/config.yaml": "{}\n"}
    ),
    scored(
        "HTTP scorer down",
        "could not be reached (ClientConnectorError: Connection refused; does it run there?)",
        None,
        urls="[http://127.0.0.1:9/score]",
    ),
    scored(
        "HTTP scorer without Content-Type",
        "needs Content-Type: application/json",
        ServiceAnswer({"score": 0.3}, content_type=""),
    ),
    scored("HTTP scorer without a score", "service 'scorer': answered with", ServiceAnswer({"reward": 0.5})),
    scored(
        "HTTP scorer is slow",
        "plugins.reward_loop.services.scorer.deadline_s=1",
        ServiceAnswer({"score": 0.3}, after_s=30),
        DEADLINE,
    ),
    RunMistake("Ctrl-C in step 1", "stopped by Ctrl-C: saved", (reward("sleeps"),), code=130, interrupt_at="asked"),
    RunMistake(
        "a sweep half of whose runs fail",
        "KeyError: 'answr'",
        ("--set", "reward.functions.ok.fn=rewards.py:length,rewards.py:raises"),
        command="sweep",
    ),
)


def made(mistake: RunMistake, base: tuple[str, ...]) -> dict[str, object]:
    """The answer of a child process in the working directory: exit code, line, wall-clock seconds and CPU seconds of
    all its processes."""
    Path("rewards.py").write_text(REWARDS, "utf-8")
    for name, text in mistake.files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text, "utf-8")
    with _scorer(mistake) as url:
        settings = [setting.replace("URL", f"{url}/score") for setting in mistake.settings]
        command = [sys.executable, "-m", "rlcore", mistake.command, *base, *settings]
        began, before = time.monotonic(), os.times()
        with Path("output").open("wb") as output:
            child = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
            if mistake.interrupt_at:
                _wait(lambda: Path(mistake.interrupt_at).exists() or child.poll() is not None)
                child.send_signal(signal.SIGINT)
            code = child.wait(timeout=600)
        after = os.times()
    lines = [line for line in Path("output").read_text("utf-8").splitlines() if mistake.words in line]
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return {
        "mistake": mistake.name,
        "code": code,
        "seconds": round(time.monotonic() - began, 2),
        "cpu_seconds": round(used, 2),
        "answer": lines[:1],
        "as_expected": code == mistake.code and bool(lines),
    }


@contextlib.contextmanager
def _answering(answer: ServiceAnswer) -> Iterator[str]:
    with serving(lambda call: answer) as service:
        yield service.url


def _scorer(mistake: RunMistake) -> AbstractContextManager[str]:
    return contextlib.nullcontext("") if mistake.service is None else _answering(mistake.service)


def _wait(holds: Callable[[], bool], limit_s: float = 300) -> None:
    end = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError(f"it did not hold within {limit_s:g} s")
        time.sleep(0.02)
