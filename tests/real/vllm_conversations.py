"""Conversations on both rollout engines, for `test_vllm_conversations.py`: vllm_conversations.py DIRECTORY.

It writes its events to DIRECTORY/told.json. Two vLLM replicas sample everything, one after the other.
"""

import asyncio
import io
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import aclosing, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from rlcore.algo.kl import FixedKl
from rlcore.contracts.actor import ActorWorker
from rlcore.contracts.agents import RolloutTask
from rlcore.data import load_prompts
from rlcore.data.batch import collate
from rlcore.plugins.planning import plan_run
from rlcore.report.metrics import MetricsLog, TrajectoryLog
from rlcore.report.terminal import Terminal
from rlcore.report.token_log import TokenLog
from rlcore.report.trace import TraceLog
from rlcore.report.trackers import Trackers
from rlcore.runtime.launch import Runtime, launch
from rlcore.runtime.rollout_service import RolloutService
from rlcore.testing.prompts import seeded_prompts
from rlcore.train.trainer import Progress, Sinks, Trainer
from rlcore.types import GenerateRequest, Lane, Prompt, Reward, Sampling, ScoredTrajectory, Trajectory

HERE = Path(sys.argv[1])
GO = HERE / "go"
MODEL = Path(__file__).parent.parent.parent / ".models" / "smollm2-135m-instruct"
TEMPERATURE = 0.9
SAMPLING = Sampling(TEMPERATURE, max_tokens=160, stop=(".", "\n"))
GREEDY = Sampling(0.0, max_tokens=160, stop=(".", "\n"))
FREE = 40
"""Tokens of a response that no stop string ends."""
PROMPTS = ("Tell me of the sea.", "What is a river?", "Say hello!", "Ask me a question.")
AGENT = '''
"""A tool that answers when it may, a parser that takes every turn for a call, and a reward."""

import asyncio
from pathlib import Path

from rlcore_agent_loop.tools.calls import ToolCall

GO = Path(__file__).parent / "go"


async def note(words: int) -> str:
    """Says how many words were said.

    Args:
        words: So many.
    """
    while not GO.exists():
        await asyncio.sleep(0.01)
    return f"These were {words} words; go on"


def calls(text):
    return [ToolCall("note", {"words": len(text.split())})]


def short(completions, **columns):
    return [-float(len(str(completion))) for completion in completions]
'''


def config(backend: str) -> dict[str, Any]:
    """A run on two vLLM engines, or on the embedded one."""
    rollout: dict[str, Any] = {"backend": backend, "samples_per_prompt": 4, "temperature": TEMPERATURE}
    plugins: dict[str, Any] = {
        "agent_loop": {
            "tools": {"note": {"fn": f"{HERE / 'agent.py'}:note", "deadline_s": 60}},
            "parser": f"{HERE / 'agent.py'}:calls",
            "describe_tools": "never",
            "max_turns": 3,
            "max_same_calls": 9,
        }
    }
    if backend == "vllm":
        engine = {"max_model_len": 512, "kv_cache_gib": 0.25, "enforce_eager": True}
        rollout["replicas"] = 2
        plugins["vllm"] = engine
    return {
        "model": {"path": str(HERE / "model")},
        "data": {"sources": {"all": {"path": str(HERE / "prompts.jsonl")}}},
        "rollout": {**rollout, "max_tokens": SAMPLING.max_tokens, "stop": list(SAMPLING.stop)},
        "reward": {"functions": {"short": {"fn": f"{HERE / 'agent.py'}:short"}}},
        "actor": {"lr": 1e-4},
        "cluster": {"threads": 1},
        "train": {"prompts_per_step": 2, "max_steps": 1, "log_completions_every": 0},
        "plugins": plugins,
    }


def write_inputs() -> None:
    """The model with one more token that ends a response, the comma, the agent's parts, and the prompts."""
    from transformers import AutoTokenizer

    (HERE / "model").mkdir()
    for file in MODEL.iterdir():
        if file.name != "generation_config.json":
            (HERE / "model" / file.name).symlink_to(file)
    known = json.loads((MODEL / "generation_config.json").read_text())
    [comma] = AutoTokenizer.from_pretrained(MODEL).encode(",")
    ends = {**known, "eos_token_id": [known["eos_token_id"], comma]}
    (HERE / "model" / "generation_config.json").write_text(json.dumps(ends))
    (HERE / "agent.py").write_text(AGENT)
    (HERE / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": prompt, "answer": ""}) + "\n" for prompt in PROMPTS)
    )


def prompts_of(run: Runtime) -> list[Prompt]:
    return load_prompts(run.plan.config.data.sources, run.plan.config.data)["all"]


def plain(trajectory: Trajectory) -> dict[str, Any]:
    """A trajectory as JSON."""
    return {
        "id": str(trajectory.id),
        "ids": trajectory.token_ids.tolist(),
        "mask": trajectory.loss_mask.astype(int).tolist(),
        "said": [dict(message) for message in trajectory.completion if not isinstance(message, str)],
        "finish": trajectory.finish.value,
        "versions": trajectory.versions,
        "turns": [dict(turn) for turn in trajectory.info["turns"]],
        "ended_by": trajectory.info["ended_by"],
    }


async def rolled(run: Runtime, tasks: Sequence[RolloutTask], sampling: Sampling) -> list[tuple[Trajectory, int]]:
    """Each trajectory, with the samples that the engines owed when it came."""
    found = []
    async with aclosing(run.agent.rollout(tasks, sampling, Lane.TRAIN)) as trajectories:  # type: ignore[type-var]
        async for trajectory in trajectories:
            found.append((trajectory, sum(outstanding(run))))
    return found


def outstanding(run: Runtime) -> tuple[int, ...]:
    """Samples that each replica owes."""
    return run.generator.outstanding if isinstance(run.generator, RolloutService) else ()


@contextmanager
def watched(run: Runtime) -> Iterator[set[tuple[int, ...]]]:
    """The work that replicas owe meanwhile, sampled all the time."""
    seen: set[tuple[int, ...]] = set()

    async def watch() -> None:
        while True:
            seen.add(outstanding(run))
            await asyncio.sleep(0.001)

    task = asyncio.create_task(watch())
    try:
        yield seen
    finally:
        task.cancel()


async def difference(run: Runtime, trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The difference between recorded log-probs and the actor's, over the sampled tokens."""
    groups: dict[str, list[ScoredTrajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.id.prompt, []).append(ScoredTrajectory(trajectory, Reward(0.0)))
    batch = collate(list(groups.values()), run.tokens.pad_id)
    computed = await run.actor.replicas[0].call(ActorWorker.logprobs, batch)
    tokens = batch.tokens
    apart = np.abs(computed - tokens.rollout_logprobs_BT)[tokens.loss_mask_BT]
    return {"mean": float(apart.mean()), "max": float(apart.max()), "num": len(apart)}


async def greedy(run: Runtime) -> dict[str, Any]:
    """An engine's responses under stop conditions, which are taken from the text of free responses first."""
    prompt_ids = [run.tokens.encode_prompt(prompt.messages) for prompt in prompts_of(run)]

    async def ask(cases: dict[str, tuple[int, int, list[str]]]) -> dict[str, Any]:
        requests = [
            GenerateRequest(name, prompt_ids[prompt], Sampling(0.0, max_tokens=most, stop=tuple(stop)), 1, 0)
            for name, (prompt, most, stop) in cases.items()
        ]
        async with aclosing(run.generator.generate(requests, Lane.TRAIN)) as completions:  # type: ignore[type-var]
            return {
                completion.request_id: {"ids": completion.token_ids.tolist(), "finish": completion.finish.value}
                async for completion in completions
            }

    free = await ask({f"{prompt}": (prompt, FREE, []) for prompt in range(len(PROMPTS))})
    cases = {}
    for prompt in range(len(PROMPTS)):
        texts = beginnings(run, free[str(prompt)]["ids"])
        inside, across = texts[5][len(texts[4]) : -1], texts[7][len(texts[5]) + 1 : -1]
        cases |= {
            f"{prompt}: a part of a token": (prompt, FREE, [inside]),
            f"{prompt}: across two tokens": (prompt, FREE, [across]),
            f"{prompt}: the one that is complete first": (prompt, FREE, [texts[7][-2:], across, inside]),
            f"{prompt}: at the last token": (prompt, 7, [across]),
            f"{prompt}: one token too late": (prompt, 6, [across]),
            f"{prompt}: never": (prompt, 8, ["\N{SNOWMAN}"]),
        }
    tasks = [RolloutTask(prompt, 0, 1, 0) for prompt in prompts_of(run)]
    conversations = [plain(trajectory) for trajectory, _ in await rolled(run, tasks, GREEDY)]
    return {
        "free": free,
        "cases": cases,
        "found": await ask(cases),
        "texts": {name: beginnings(run, completion["ids"]) for name, completion in free.items()},
        "eos": sorted(run.tokens.eos_ids),
        "conversations": sorted(conversations, key=lambda conversation: conversation["id"]),
    }


def beginnings(run: Runtime, ids: Sequence[int]) -> list[str]:
    """The text of the first 0, 1, 2, ... tokens."""
    return [run.tokens.decode(ids[:num]) for num in range(len(ids) + 1)]


async def one_group(run: Runtime) -> dict[str, Any]:
    """Six conversations of one prompt, alone."""
    with watched(run) as seen:
        found = await rolled(run, [RolloutTask(prompts_of(run)[0], 0, 6, 3)], SAMPLING)
    trajectories = [result for result, _ in found]
    return {
        "trajectories": [plain(trajectory) for trajectory in trajectories],
        "texts": [
            [run.tokens.decode(trajectory.token_ids[a:b].tolist()) for a, b in spans(trajectory)]
            for trajectory in trajectories
        ],
        "owed": [outstanding for _, outstanding in found],
        "outstanding": sorted(seen),
        "difference": await difference(run, trajectories),
    }


def spans(trajectory: Trajectory) -> list[tuple[int, int]]:
    """Start and end of each sampled turn, and the messages between them."""
    turns = [(turn["start"], turn["start"] + turn["num_tokens"]) for turn in trajectory.info["turns"]]
    between = [(before[1], after[0]) for before, after in pairwise(turns)]
    return [*turns, *between]


async def one_step(run: Runtime) -> dict[str, Any]:
    """A step of GRPO."""
    progress = Progress(0, seeded_prompts({"all": prompts_of(run)}, {}, 0, True), FixedKl(0.0))
    terminal = Terminal(Console(file=io.StringIO()))
    trackers = Trackers((), "rlcore", HERE, "", warn=terminal.warn)
    sinks = Sinks(
        MetricsLog(HERE),
        TrajectoryLog(HERE),
        TokenLog(HERE, "none", run.tokens),
        TraceLog(HERE, 0.0),
        trackers,
        terminal,
    )
    await run.actor.replicas[0].call(ActorWorker.expect, 1)
    trainer = Trainer(run, progress, 1, {}, sinks)
    await trainer.step()
    await trainer.close()
    rows = [json.loads(line) for line in (HERE / "trajectories" / "step_000001.jsonl").read_text().splitlines()]
    return {"metrics": trainer.history[-1], "versions": [row["versions"] for row in rows]}


async def weights_between_turns(run: Runtime) -> dict[str, Any]:
    """Two groups whose first turns are sampled before new weights are handed over, and the others after it."""
    GO.unlink()
    tasks = [RolloutTask(prompt, 0, 3, 5) for prompt in prompts_of(run)[1:3]]
    with watched(run) as seen:
        rolling = asyncio.create_task(rolled(run, tasks, SAMPLING))
        async with asyncio.timeout(60):
            while not any(sum(value) for value in seen) or sum(outstanding(run)):
                await asyncio.sleep(0.01)
        await run.publish(2)
        GO.touch()
        found = [value for value, _ in await rolling]
    return {
        "trajectories": [plain(result) for result in found],
        "outstanding": sorted(seen),
        "difference": await difference(run, found),
    }


async def story() -> dict[str, Any]:
    """Everything that happened."""
    GO.touch()
    results: dict[str, Any] = {}
    async with launch(plan_run([config("hf")], []), HERE / "hf") as run:
        results["hf"] = await greedy(run)
    async with launch(plan_run([config("vllm")], []), HERE / "vllm") as run:
        results["vllm"] = await greedy(run)
        results["group"] = await one_group(run)
        results["step"] = await one_step(run)
        results["between"] = await weights_between_turns(run)
    return results


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    write_inputs()
    (HERE / "told.json").write_text(json.dumps(asyncio.run(story())))
