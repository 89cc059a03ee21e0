"""Our side of a comparison: production plan, launch and trainer, one step per request. See `benchmarks/channel.py`.

The spec: `config` (as in a configuration file), `overrides`, `plugins`, `run_dir`.
"""

import asyncio
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from channel import Channel
from live import live

from rlcore.algo.step import weigh
from rlcore.contracts.actor import ActorWorker
from rlcore.data.batch import collate
from rlcore.report.metrics import read
from rlcore.runtime.launch import Runtime
from rlcore.train.run_prompts import load_data
from rlcore.train.trainer import Trainer
from rlcore.types import (
    Batch,
    FinishReason,
    GenerateRequest,
    Lane,
    Prompt,
    Reward,
    Sampling,
    ScoredTrajectory,
    Trajectory,
    TrajectoryId,
)


async def serve(channel: Channel, spec: dict[str, Any]) -> None:
    """Launch the run of the spec, and answer questions until the channel is closed."""
    run_dir = Path(spec["run_dir"])
    async with live(spec["config"], spec.get("overrides", []), spec.get("plugins", []), run_dir) as trainer:
        run = trainer.run
        prompts = load_data(run.plan.config).train
        facts = await trainer.actor.call(ActorWorker.facts)
        encoded = [
            list(run.tokens.encode_prompt(request.messages)) for source in prompts.values() for request in source
        ]
        memory = dict(getattr(run.plan, "memory_bytes", None) or {})
        channel.send({"facts": facts, "prompt_ids": encoded, "memory_bytes": memory})
        while (question := await asyncio.to_thread(channel.receive)) is not None:
            channel.send(await answer(run, trainer, run_dir, question))


async def answer(run: Runtime, trainer: Trainer, run_dir: Path, question: dict[str, Any]) -> dict[str, Any]:
    """The answer to one question: step, evaluate, warm, logprobs or gate."""
    match question["do"]:
        case "step":
            return await step(trainer, run_dir)
        case "evaluate":
            await trainer.evaluate()
            return trainer.evaluations[-1][1]
        case "warm":
            return await warm(run, trainer, question)
        case "logprobs":
            logprobs = await trainer.actor.call(ActorWorker.logprobs, fixed_batch(run, question))
            rows = [fixed_span(question, row) for row in range(len(question["prompt_ids"]))]
            return {"logprobs": [logprobs[row, span].tolist() for row, span in enumerate(rows)]}
        case "gate":
            metrics = await trainer.actor.call(ActorWorker.update, fixed_batch(run, question))
            return {"loss": metrics["policy/loss"], "grad_norm": metrics["actor/grad_norm"]}
        case unknown:
            raise ValueError(f"rlcore_side: the question '{unknown}' is unknown")


async def step(trainer: Trainer, run_dir: Path) -> dict[str, Any]:
    """Take one training step; returns its times as the trainer logs them."""
    began = time.perf_counter()
    await trainer.step()
    step_s = time.perf_counter() - began
    metrics = read(run_dir)[-1]
    rows = trainer.config.train.prompts_per_step * trainer.config.rollout.samples_per_prompt
    return {
        "step_s": step_s,
        "generate_s": metrics["time/generate_s"],
        "reward_wait_s": metrics["time/reward_wait_s"],
        "update_s": metrics["time/update_s"],
        "new_tokens": round(metrics["completion/length_mean"] * rows),
        "reward": metrics["reward/mean"],
    }


async def warm(run: Runtime, trainer: Trainer, question: dict[str, Any]) -> dict[str, Any]:
    """Sample two tokens per prompt and run one forward pass, so that one-time allocation and compilation are not
    timed."""
    sampling = Sampling(max_tokens=2)
    requests = [
        GenerateRequest(f"warm/{index:06d}", tuple(ids), sampling, n=run.plan.config.rollout.samples_per_prompt, seed=0)
        for index, ids in enumerate(question["distinct_prompt_ids"])
    ]
    async for _ in run.generator.generate(requests, Lane.TRAIN):
        pass
    await trainer.actor.call(ActorWorker.logprobs, fixed_batch(run, question))
    return {}


def fixed_span(question: dict[str, Any], row: int) -> slice:
    """The positions of a row's completion."""
    start = len(question["prompt_ids"][row])
    return slice(start, start + len(question["completion_ids"][row]))


def fixed_batch(run: Runtime, question: dict[str, Any]) -> Batch:
    """The question's rows as the trainer would collate and weight them. A group is a series of equal prompts."""
    groups: list[list[ScoredTrajectory]] = []
    previous = None
    for prompt_ids, completion_ids in zip(question["prompt_ids"], question["completion_ids"], strict=True):
        if prompt_ids != previous:
            groups.append([])
        previous = prompt_ids
        groups[-1].append(fixed_row(len(groups), len(groups[-1]), prompt_ids, completion_ids))
    batch = collate(groups, run.tokens.pad_id)
    batch = replace(batch, advantages_B=np.array(question["advantages"], dtype=np.float32))
    if "old_logprobs" in question:
        old_BT = batch.tokens.rollout_logprobs_BT.copy()
        for row, logprobs in enumerate(question["old_logprobs"]):
            old_BT[row, fixed_span(question, row)] = logprobs
        batch = replace(batch, old_logprobs_BT=old_BT)
    return weigh(batch, run.plan.config.algo)


def fixed_row(group: int, sample: int, prompt_ids: list[int], completion_ids: list[int]) -> ScoredTrajectory:
    """One row of a fixed batch."""
    token_ids = np.array([*prompt_ids, *completion_ids], dtype=np.int32)
    mask: npt.NDArray[np.bool_] = np.arange(len(token_ids)) >= len(prompt_ids)
    prompt = Prompt(f"fixed/{group}", ({"role": "user", "content": ""},), None, "fixed")
    trajectory = Trajectory(
        id=TrajectoryId(prompt.id, 0, sample),
        prompt=prompt,
        token_ids=token_ids,
        loss_mask=mask,
        logprobs=np.zeros(len(token_ids), dtype=np.float32),
        completion="",
        finish=FinishReason.STOP,
        versions=((len(prompt_ids), 0),),
    )
    return ScoredTrajectory(trajectory, Reward(0.0))


def main() -> None:
    """Serve the parent of this process."""
    channel = Channel()
    spec = channel.receive()
    if spec is None:
        sys.exit("rlcore_side: it is started by a benchmark, which tells it what to do")
    asyncio.run(serve(channel, spec))


if __name__ == "__main__":
    main()
