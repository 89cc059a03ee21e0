"""A plan that is started to sample with the weights of a checkpoint, and writes no run directory."""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from rlcore.contracts.actor import ActorWorker
from rlcore.data import load_prompts
from rlcore.errors import ConfigError
from rlcore.plan import RunPlan
from rlcore.report.terminal import Terminal
from rlcore.runtime.launch import Runtime, launch
from rlcore.runtime.sampling_workers import Sampler, launch_sampler
from rlcore.train import checkpoint
from rlcore.train.evaluate import EvalResult, evaluate
from rlcore.train.run_prompts import RunPrompts, fitting
from rlcore.train.same_model import check_same_base


@asynccontextmanager
async def loaded_sampler(plan: RunPlan, weights: Path) -> AsyncIterator[Sampler]:
    """The plan's actor and rollout alone, started, with the weights of a checkpoint."""
    with tempfile.TemporaryDirectory(prefix="rlcore-chat-") as scratch:
        async with launch_sampler(plan, Path(scratch)) as sampler:
            await _load(plan, sampler, weights)
            yield sampler


@asynccontextmanager
async def loaded_run(plan: RunPlan, weights: Path | None) -> AsyncIterator[Runtime]:
    """The started plan, with the weights of a checkpoint, or as its configuration says."""
    with tempfile.TemporaryDirectory(prefix="rlcore-eval-") as scratch:
        async with launch(plan, Path(scratch)) as run:
            if weights is not None:
                await _load(plan, run, weights)
            yield run


async def _load(plan: RunPlan, sampler: Sampler, weights: Path) -> None:
    loaded = await asyncio.to_thread(checkpoint.load, weights)
    if plan.config.actor.lora.enabled:
        await asyncio.to_thread(check_same_base, plan.config.model, weights, loaded.state)
    await sampler.lease.train()  # until its weights are with the servers
    await sampler.actor.replicas[0].call(ActorWorker.restore, loaded.path)
    await sampler.sync_weights(loaded.step)


async def evaluate_async(plan: RunPlan, weights: Path | None) -> EvalResult:
    """The held-out prompts under the configured model or a checkpoint's weights."""
    heldout = load_prompts(plan.config.eval.sources, plan.config.data)
    if not heldout:
        raise ConfigError(
            "eval.sources: nothing to evaluate on; needs at least one source, such as "
            "eval.sources.heldout.path=heldout.jsonl"
        )
    async with loaded_run(plan, weights) as run:
        prompts = (await fitting(run, RunPrompts({}, heldout), Terminal())).heldout
        return await evaluate(run, prompts, plan.config.train.seed)
