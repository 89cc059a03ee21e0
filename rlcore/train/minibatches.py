"""Mini-batches of a step, and the records of its rows."""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence

import numpy as np

from rlcore.algo.step import weigh
from rlcore.data.batch import minibatches
from rlcore.runtime.launch import Runtime
from rlcore.types import Batch, FinishReason, Metrics, ScoredTrajectory


async def one_ahead(items: AsyncGenerator[Batch, None]) -> AsyncGenerator[Batch, None]:
    """Yields the items; the next one is computed while one is used."""
    following = asyncio.create_task(anext(items, None))
    try:
        while (batch := await following) is not None:
            following = asyncio.create_task(anext(items, None))
            yield batch
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await items.aclose()


def epoch_minibatches(run: Runtime, batch: Batch, step: int, epoch: int) -> list[Batch]:
    """The weighted mini-batches of one pass over the batch; their order depends only on (run seed, step, epoch)."""
    config = run.plan.config
    order = np.random.default_rng((config.train.seed, step, epoch))
    parts = minibatches(batch, config.actor.minibatch_prompts, order)
    return [weigh(part, config.algo, run.selection) for part in parts]


def later_epoch(streamed: Sequence[Batch], seed: int, step: int, epoch: int) -> Iterator[Batch]:
    """The mini-batches of the first epoch, in an order drawn for this epoch."""
    for index in np.random.default_rng((seed, step, epoch)).permutation(len(streamed)):
        yield streamed[index]


def row_advantages(batch: Batch) -> list[float]:
    """One advantage per row: the estimator's, or the mean over the row's sampled tokens if it gives one per token."""
    if batch.advantages_B is not None:
        advantages_B = batch.advantages_B
    elif batch.advantages_BT is not None:
        sums_B = (batch.advantages_BT * batch.tokens.loss_mask_BT).sum(axis=1)
        advantages_B = sums_B / np.maximum(batch.num_sampled_B, 1)
    else:
        return [0.0] * len(batch)
    found: list[float] = advantages_B.tolist()
    return found


def completion_metrics(scored: Sequence[ScoredTrajectory]) -> Metrics:
    """Lengths in sampled tokens, and the number of completions truncated by the token budget."""
    if not scored:
        return {}
    lengths = [sample.trajectory.num_sampled for sample in scored]
    cut = [sample.trajectory.finish is FinishReason.LENGTH for sample in scored]
    return {
        "completion/length_mean": sum(lengths) / len(lengths),
        "completion/length_max": float(max(lengths)),
        "completion/length_min": float(min(lengths)),
        "completion/clipped_frac": sum(cut) / len(cut),
        "data/num_tokens": float(sum(len(sample.trajectory.token_ids) for sample in scored)),
    }
