"""Measures the agent loop without model and tools: whole conversations on the null model, in the production run.

    .venv/bin/python benchmarks/agent_loop.py [--smoke]

Prints one JSON line:

* `overlap`: the time of 256 conversations whose tool takes U(0, 2) s per call, compared with the longest chain of
  calls among them. No conversation waits for another.
* `turn_ms`: milliseconds per turn by the number of turns of a conversation, when the tool takes no time. It counts all
  work of the process, and stays the same if nothing is tokenised twice.
* `continuation_ms`: milliseconds to tokenise a tool's result after conversations of different lengths. It uses
  SmolLM2's tokenizer and template, and needs the model.
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measure import MODEL, collector_off, emit, summary

from rlcore.config import ModelConfig
from rlcore.contracts.agents import RolloutTask
from rlcore.data import load_prompts
from rlcore.data.tokenizer import load_tokens
from rlcore.plugins.planning import plan_run
from rlcore.runtime.launch import launch
from rlcore.types import Lane, Sampling

TOOL = '''
import asyncio

from rlcore_agent_loop.tools.calls import ToolCall


class Wait:
    """Sleeps as long as the row says."""

    def create(self, columns):
        self.pauses = iter(columns["pauses"])

    async def execute(self):
        await asyncio.sleep(next(self.pauses, 0.0))
        return "done"


def always(text):
    """Every turn calls the tool."""
    return [ToolCall("wait", {})]
'''
# Half of all bytes end a turn of the null model. Its other tokens have no meaning.
STOPS = [chr(byte) for byte in range(128)]


async def conversations(directory: Path, pauses: Sequence[Sequence[float]], turns: int) -> float:
    """Seconds of one rollout with one conversation per list of pauses."""
    (directory / "tool.py").write_text(TOOL)
    rows = [{"question": "?", "pauses": list(pause)} for pause in pauses]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config: dict[str, Any] = {
        "model": {"path": "none", "tokenizer": "bytes"},
        "data": {"sources": {"rows": {"path": str(directory / "rows.jsonl")}}, "shuffle": False},
        "actor": {"backend": "null"},
        "rollout": {"backend": "null", "max_tokens": 100_000, "samples_per_prompt": 2},
        "reward": {"functions": {"letters": {"fn": "count_letter"}}},
        "plugins": {
            "agent_loop": {
                "tools": {"wait": {"fn": f"{directory / 'tool.py'}:Wait"}},
                "parser": f"{directory / 'tool.py'}:always",
                "describe_tools": "never",
                "max_turns": turns,
                "turn_tokens": 64,
                "max_same_calls": turns,
                "children": 1,
            }
        },
    }
    plan = plan_run([config], [], ["null"])
    async with launch(plan, directory) as run:
        prompts = load_prompts(plan.config.data.sources, plan.config.data)["rows"]
        tasks = [RolloutTask(prompt, 0, 1, seed) for seed, prompt in enumerate(prompts)]
        sampling = Sampling(max_tokens=100_000, stop=tuple(STOPS))
        with collector_off():
            began = time.perf_counter()
            found = [trajectory async for trajectory in run.agent.rollout(tasks, sampling, Lane.TRAIN)]
            seconds = time.perf_counter() - began
    cut = [sample for sample in found if sample.turns != turns]
    if len(found) != len(pauses) or len(cut) > len(found) // 20:
        raise SystemExit(f"agent_loop: {len(cut)} of {len(found)} conversations ended before their {turns} turns")
    return seconds


def overlap(num: int, longest_s: float) -> dict[str, float]:
    """The wall time of `num` conversations of three calls each, and the longest chain of calls."""
    numbers = random.Random(0)
    pauses = [[numbers.uniform(0, longest_s) for _ in range(3)] for _ in range(num)]
    with tempfile.TemporaryDirectory() as directory:
        wall_s = asyncio.run(conversations(Path(directory), pauses, 4))
    chain_s = max(sum(pause) for pause in pauses)
    return {"conversations": num, "longest_chain_s": chain_s, "wall_s": wall_s, "ratio": wall_s / chain_s}


def turn_ms(num: int, turns: int, repeats: int) -> dict[str, float]:
    """Milliseconds of one turn."""
    found = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as directory:
            seconds = asyncio.run(conversations(Path(directory), [[]] * num, turns))
        found.append(1000 * seconds / (num * turns))
    return summary(found)


def continuation_ms(repeats: int) -> dict[str, dict[str, float]]:
    """Milliseconds of one continuation after conversations of 1 and of 128 turns."""
    tokens = load_tokens(ModelConfig(path=str(MODEL)), "")
    result = [{"role": "tool", "content": "The weather is fine. " * 8}]
    measured = {}
    for turns in (1, 128):
        ids = list(tokens.encode_prompt([{"role": "user", "content": "hello"}]))
        for _ in range(turns):
            ids += [ids[-1]] * 20
            ids += tokens.continuation(result, ids[-1])
        found = []
        for _ in range(repeats):
            began = time.perf_counter()
            tokens.continuation(result, ids[-1])
            found.append(1000 * (time.perf_counter() - began))
        measured[str(turns)] = summary(found)
    return measured


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--smoke", action="store_true", help="smaller, to see that it runs")
    smoke = parser.parse_args(arguments).smoke
    repeats = 1 if smoke else 3
    lengths = (4, 16) if smoke else (8, 32, 128)
    result: dict[str, Any] = {
        "overlap": overlap(32, 0.2) if smoke else overlap(256, 2.0),
        "turn_ms": {str(turns): turn_ms(16, turns, repeats) for turns in lengths},
    }
    if MODEL.exists() and not smoke:
        result["continuation_ms"] = continuation_ms(200)
    emit("agent_loop", result)


if __name__ == "__main__":
    main()
